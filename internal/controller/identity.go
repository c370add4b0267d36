package controller

import (
	"cmp"
	"strings"
	"unicode"
	"unicode/utf16"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/token-lease/operator/api/v1alpha1"
	"github.com/token-lease/operator/internal/ledger"
)

// actorUnknown is recorded when nobody says who asked, such as for a deletion.
const actorUnknown = "unknown"

// bucketKeyOf is the key of a TokenBucket's bucket in the ledger.
func bucketKeyOf(b *v1alpha1.TokenBucket) string {
	if b.Spec.BucketKey != "" {
		return b.Spec.BucketKey
	}
	return b.Namespace + "/" + b.Name
}

// knownKeyOf is the key under which the ledger has held the bucket, as far as an
// object tells whose spec may be unreadable.
func knownKeyOf(b *v1alpha1.TokenBucket, unreadable string) string {
	if unreadable != "" && b.Status.BucketKey != "" {
		return b.Status.BucketKey
	}
	return bucketKeyOf(b)
}

// tenantOf is the tenant of a TokenBucket, unique within its namespace.
func tenantOf(b *v1alpha1.TokenBucket) string {
	if b.Spec.TenantID != "" {
		return string(b.Spec.TenantID)
	}
	return b.Name
}

// keyAllowed reports whether a TokenBucket may use its key: nobody takes another
// namespace's name, unless the namespace is trusted.
func keyAllowed(b *v1alpha1.TokenBucket, trusted bool) bool {
	rest, inside := strings.CutPrefix(bucketKeyOf(b), b.Namespace+"/")
	return trusted || inside && rest != ""
}

func ownerOf(b *v1alpha1.TokenBucket, cluster string) ledger.Owner {
	return ledger.Owner{
		Cluster: cluster, Namespace: b.Namespace, Name: b.Name,
		UID: string(b.UID), CreatedAt: b.CreationTimestamp.Time,
	}
}

// actorOf is who asked, as the annotation says.
func actorOf(object client.Object) string {
	return nameIn(object, v1alpha1.RequestedByAnnotation)
}

// nameIn is the name in an annotation.
func nameIn(object client.Object, annotation string) string {
	return cmp.Or(textIn(object, annotation), actorUnknown)
}

// claimIn is whom the actor claims to ask for, "" for nobody.
func claimIn(object client.Object) string { return textIn(object, v1alpha1.OnBehalfOfAnnotation) }

// textIn is the text of an annotation: one trimmed line within the bounds of the
// audit. Anything may stand in an annotation.
func textIn(object client.Object, annotation string) string {
	text := strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(object.GetAnnotations()[annotation], "?"))
	return trim(firstUnits(trim(text), ledger.MaxActorLength))
}

// firstUnits is the beginning of a text, at most so many UTF-16 units long.
func firstUnits(text string, maximum int) string {
	units := 0
	for i, r := range text {
		if units += utf16.RuneLen(r); units > maximum {
			return text[:i]
		}
	}
	return text
}

// trim takes white space off as the ledger judges it, which includes the byte
// order mark.
func trim(text string) string {
	return strings.TrimFunc(text, func(r rune) bool { return unicode.IsSpace(r) || r == '\uFEFF' })
}
