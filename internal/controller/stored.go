package controller

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	utiljson "k8s.io/apimachinery/pkg/util/json"

	"github.com/token-lease/operator/api/v1alpha1"
)

// AddToScheme registers both kinds as this package reads them. A manager whose
// controllers are set up here needs this instead of v1alpha1.AddToScheme: one
// stored object that the types of v1alpha1 cannot hold would fail every LIST of
// its kind, and with it every object of the kind.
//
// Such objects do exist: an older or a newer schema let them in, or somebody wrote
// to etcd. The types below never refuse an object. They keep of it what can be
// read and say what cannot, through every path of every client: informers, plain
// reads, and the answers to patches.
func AddToScheme(scheme *runtime.Scheme) error {
	version := v1alpha1.GroupVersion
	scheme.AddKnownTypeWithName(version.WithKind("TokenBucket"), &storedBucket{})
	scheme.AddKnownTypeWithName(version.WithKind("TokenBucketList"), &storedBucketList{})
	scheme.AddKnownTypeWithName(version.WithKind("TemporaryLimitLease"), &storedLease{})
	scheme.AddKnownTypeWithName(version.WithKind("TemporaryLimitLeaseList"), &storedLeaseList{})
	metav1.AddToGroupVersion(scheme, version)
	return nil
}

// storedBucket is a TokenBucket as the API server has it.
type storedBucket struct {
	v1alpha1.TokenBucket `json:",inline"`
	damage
}

type storedBucketList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitzero"`
	Items           []storedBucket `json:"items"`
}

// storedLease is a TemporaryLimitLease as the API server has it.
type storedLease struct {
	v1alpha1.TemporaryLimitLease `json:",inline"`
	damage
}

type storedLeaseList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitzero"`
	Items           []storedLease `json:"items"`
}

// damage is what could not be read of a stored object. It is never stored.
type damage struct {
	// unreadable says which fields of the spec could not be read, and why; "" when
	// all could. Then nothing is asked of the ledger in the object's name.
	unreadable string
	// rawStatus is the whole status where a part of it could not be read. That part
	// counts as absent and is replaced by the next write.
	rawStatus json.RawMessage
}

func (d damage) storedStatus() json.RawMessage { return d.rawStatus }

// UnmarshalJSON reads an object whatever stands in its spec and status.
func (b *storedBucket) UnmarshalJSON(data []byte) error {
	*b = storedBucket{}
	// A limit that is absent must not pass for a limit of 0.
	if utiljson.Unmarshal(data, &b.TokenBucket) == nil && b.Spec.Limit != 0 {
		return nil
	}
	*b = storedBucket{}
	meta, spec, status, err := parts(data)
	if err != nil {
		return err
	}
	b.TypeMeta, b.ObjectMeta = meta.TypeMeta, meta.ObjectMeta
	b.unreadable = salvage(spec, "spec", &b.Spec, "limit")
	if salvage(status, "status", &b.Status) != "" {
		b.rawStatus = slices.Clone(status)
	}
	return nil
}

// UnmarshalJSON reads an object whatever stands in its spec and status.
func (l *storedLease) UnmarshalJSON(data []byte) error {
	*l = storedLease{}
	if utiljson.Unmarshal(data, &l.TemporaryLimitLease) == nil && l.Spec.NormalLimit != 0 {
		return nil
	}
	*l = storedLease{}
	meta, spec, status, err := parts(data)
	if err != nil {
		return err
	}
	l.TypeMeta, l.ObjectMeta = meta.TypeMeta, meta.ObjectMeta
	l.unreadable = salvage(spec, "spec", &l.Spec, "normalLimit", "temporaryLimit", "expiresAt")
	if salvage(status, "status", &l.Status) != "" {
		l.rawStatus = slices.Clone(status)
	}
	return nil
}

// parts takes an object apart. Its metadata can always be read: the API server
// itself reads it on every request.
func parts(data []byte) (meta metav1.PartialObjectMetadata, spec, status json.RawMessage, err error) {
	if err = utiljson.Unmarshal(data, &meta); err != nil {
		return meta, nil, nil, err
	}
	var rest struct {
		Spec   json.RawMessage `json:"spec"`
		Status json.RawMessage `json:"status"`
	}
	err = utiljson.Unmarshal(data, &rest)
	return meta, rest.Spec, rest.Status, err
}

// salvage reads those fields of an object that can be read, each by itself, and
// says which cannot, in the order of their names.
func salvage[T any](data json.RawMessage, path string, into *T, required ...string) string {
	var fields map[string]json.RawMessage
	if len(data) > 0 {
		if err := utiljson.Unmarshal(data, &fields); err != nil {
			return fmt.Sprintf("%s (%v)", path, err)
		}
	}
	var wrong []string
	for _, name := range required {
		if text := string(fields[name]); text == "" || text == "null" {
			wrong = append(wrong, path+"."+name+" (is absent)")
		}
	}
	for _, name := range slices.Sorted(maps.Keys(fields)) {
		field, err := json.Marshal(map[string]json.RawMessage{name: fields[name]})
		if err == nil {
			// A field that fails half-way must leave nothing behind.
			if err = utiljson.Unmarshal(field, new(T)); err == nil {
				err = utiljson.Unmarshal(field, into)
			}
		}
		if err != nil {
			wrong = append(wrong, fmt.Sprintf("%s.%s (%v)", path, name, err))
		}
	}
	return strings.Join(wrong, ", ")
}

// undecodable is the failure of an object whose spec cannot be read.
func undecodable(unreadable string) *failure {
	return &failure{
		reason: v1alpha1.ReasonUndecodable, stalled: true, after: resyncInterval,
		message: "The stored object cannot be read, so nothing is done for it: correct it, or delete it and create it anew. Unreadable: " + unreadable,
	}
}

// DeepCopy returns a copy that shares nothing with b.
func (b *storedBucket) DeepCopy() *storedBucket {
	return &storedBucket{TokenBucket: *b.TokenBucket.DeepCopy(), damage: b.clone()}
}

// DeepCopyObject implements runtime.Object.
func (b *storedBucket) DeepCopyObject() runtime.Object { return b.DeepCopy() }

// DeepCopyObject implements runtime.Object.
func (l *storedBucketList) DeepCopyObject() runtime.Object {
	meta := l.ListMeta
	list := &storedBucketList{TypeMeta: l.TypeMeta, ListMeta: *meta.DeepCopy(), Items: make([]storedBucket, len(l.Items))}
	for i := range l.Items {
		list.Items[i] = *l.Items[i].DeepCopy()
	}
	return list
}

// DeepCopy returns a copy that shares nothing with l.
func (l *storedLease) DeepCopy() *storedLease {
	return &storedLease{TemporaryLimitLease: *l.TemporaryLimitLease.DeepCopy(), damage: l.clone()}
}

// DeepCopyObject implements runtime.Object.
func (l *storedLease) DeepCopyObject() runtime.Object { return l.DeepCopy() }

// DeepCopyObject implements runtime.Object.
func (l *storedLeaseList) DeepCopyObject() runtime.Object {
	meta := l.ListMeta
	list := &storedLeaseList{TypeMeta: l.TypeMeta, ListMeta: *meta.DeepCopy(), Items: make([]storedLease, len(l.Items))}
	for i := range l.Items {
		list.Items[i] = *l.Items[i].DeepCopy()
	}
	return list
}

func (d damage) clone() damage {
	return damage{unreadable: d.unreadable, rawStatus: slices.Clone(d.rawStatus)}
}
