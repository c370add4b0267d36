// Package dataplane serves tokenlease.v1alpha1.LedgerService to workloads: Connect,
// gRPC and gRPC-Web on one port, over TLS.
//
// Every request shows a token of a Kubernetes ServiceAccount. What its claims already
// say against it (not a token, expired, made for somebody else) is refused without
// asking anybody, since asking costs the API server. The rest is asked of it: a
// TokenReview that names the audience, and whose answer must name it too, and for each
// bucket and verb a SubjectAccessReview. Answers are kept for a short while in caches of
// bounded size. Where no answer can be had, the request is refused as one to repeat.
//
// The reviews are made with client-go. The library of the API server has the same two,
// but its token cache has no bound, its authenticator tells an outage from a refusal by
// text alone, and its authorizer brings the expression compiler of the API server along.
//
// A bucket is named by namespace and name and found by its owner. A caller who may not
// do a thing with a bucket gets the very answer of one who names a bucket that is not
// there, and the ledger is not asked.
//
// A lease belongs to the user name that reserved it. Others cannot settle or extend it:
// to them it is not there. Whoever may delete tokenbuckets/leases may release any.
//
// JSON is stricter than protobuf's own rules in one way: a field that is not known is
// refused, since a misspelt one would be taken for absent. What has the value 0 is
// written out.
package dataplane
