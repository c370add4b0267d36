package controller

import (
	"context"
	"errors"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/token-lease/operator/api/v1alpha1"
	"github.com/token-lease/operator/internal/ledger"
	"github.com/token-lease/operator/internal/ledger/memory"
)

// storeActiveRaise puts the raise of testLease into a ledger of its own.
func storeActiveRaise(t *testing.T) *ledger.Ledger {
	t.Helper()
	store := memory.New(memory.Options{Clock: func() time.Time { return testNow }})
	l := ledger.New(store, nil)
	b := testBucket(func(b *v1alpha1.TokenBucket) {
		b.Spec.Raises = &v1alpha1.RaisePolicy{Mode: v1alpha1.RaiseModeEnforce, MaxLimit: 1000, MaxDurationSeconds: 7200}
	})
	if _, err := l.ApplyDeclared(t.Context(), *declareRequest(b, "cluster")); err != nil {
		t.Fatal(err)
	}
	raise, err := l.StoreRaise(t.Context(), *storeRequest(leaseInput{lease: testLease(), bucket: b, cluster: "cluster"}))
	if err != nil || raise.State != ledger.RaiseActive {
		t.Fatalf("raise %+v, %v", raise, err)
	}
	return l
}

// Goal: only a plain answer of an API server that serves the kinds and holds
// buckets, given twice, ends a raise; every doubt keeps it.
func TestOrphans(t *testing.T) {
	scheme := runtime.NewScheme()
	if err := AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	other := func(change func(*v1alpha1.TemporaryLimitLease)) *v1alpha1.TemporaryLimitLease {
		return testLease(func(l *v1alpha1.TemporaryLimitLease) { l.UID = types.UID("other-uid") }, change)
	}
	down := errors.New("the API server does not answer")
	failing := func(get, list error) interceptor.Funcs {
		return interceptor.Funcs{
			Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, object client.Object, options ...client.GetOption) error {
				if get != nil {
					return get
				}
				return c.Get(ctx, key, object, options...)
			},
			List: func(ctx context.Context, c client.WithWatch, objects client.ObjectList, options ...client.ListOption) error {
				if list != nil {
					return list
				}
				return c.List(ctx, objects, options...)
			},
		}
	}
	unreadable := interceptor.Funcs{
		Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, object client.Object, options ...client.GetOption) error {
			err := c.Get(ctx, key, object, options...)
			if lease, ok := object.(*storedLease); ok {
				lease.unreadable = "spec.approvalID"
			}
			return err
		},
	}
	for _, c := range []struct {
		name    string
		objects []client.Object
		api     interceptor.Funcs
		want    ledger.RaiseState
	}{
		{"lease gone", []client.Object{testBucket()}, interceptor.Funcs{}, ledger.RaiseRestored},
		{"lease there", []client.Object{testBucket(), testLease()}, interceptor.Funcs{}, ledger.RaiseActive},
		{"empty cluster", nil, interceptor.Funcs{}, ledger.RaiseActive},
		{"no answer", []client.Object{testBucket()}, failing(down, nil), ledger.RaiseActive},
		{"kind not served", []client.Object{testBucket()}, failing(nil, down), ledger.RaiseActive},
		{"made anew, same grant", []client.Object{testBucket(), other(func(*v1alpha1.TemporaryLimitLease) {})}, interceptor.Funcs{}, ledger.RaiseActive},
		{"made anew, other grant", []client.Object{testBucket(), other(func(l *v1alpha1.TemporaryLimitLease) { l.Spec.ApprovalID = "CHG-2" })}, interceptor.Funcs{}, ledger.RaiseRestored},
		{"made anew, cannot be read", []client.Object{testBucket(), other(func(l *v1alpha1.TemporaryLimitLease) { l.Spec.ApprovalID = "" })}, unreadable, ledger.RaiseActive},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := storeActiveRaise(t)
			var objects []client.Object
			for _, object := range c.objects {
				object.SetDeletionTimestamp(nil)
				object.SetCreationTimestamp(metav1.NewTime(testNow))
				switch object := object.(type) {
				case *v1alpha1.TokenBucket:
					objects = append(objects, &storedBucket{TokenBucket: *object})
				case *v1alpha1.TemporaryLimitLease:
					objects = append(objects, &storedLease{TemporaryLimitLease: *object})
				}
			}
			stored := fake.NewClientBuilder().WithScheme(scheme).WithObjects(objects...).Build()
			empty := fake.NewClientBuilder().WithScheme(scheme).Build()
			s := &orphans{
				cached: empty, api: interceptor.NewClient(stored, c.api),
				options: Options{Ledger: l, ClusterID: "cluster"}, suspects: map[string]bool{},
			}
			state := func() ledger.RaiseState {
				record, err := l.Store().Raise(t.Context(), "cluster", "lease-uid")
				if err != nil {
					t.Fatal(err)
				}
				return record.State
			}
			_ = s.look(t.Context())
			if got := state(); got != ledger.RaiseActive {
				t.Fatalf("%s after one look", got)
			}
			for range 3 {
				_ = s.look(t.Context())
			}
			if got := state(); got != c.want {
				t.Errorf("%s, want %s", got, c.want)
			}
		})
	}
}
