package dataplane

import (
	"context"
	"errors"

	authenticationv1 "k8s.io/api/authentication/v1"

	"github.com/token-lease/operator/internal/ledger"
	v1 "github.com/token-lease/operator/proto/tokenlease/v1alpha1"
	"github.com/token-lease/operator/proto/tokenlease/v1alpha1/tokenleasev1alpha1connect"
)

// service carries out what a caller may do. What it returns as an error is a
// *ledger.Error, which the interceptor turns into an answer.
type service struct {
	ledger     *ledger.Ledger
	finder     *finder
	authorizer *authorizer
	expiries   *expiries
	// lists bounds the pages that are read.
	lists *lane
}

var _ tokenleasev1alpha1connect.LedgerServiceHandler = (*service)(nil)

// callerKey is where a request's context keeps who asks.
type callerKey struct{}

func callerOf(ctx context.Context) *authenticationv1.UserInfo {
	user, _ := ctx.Value(callerKey{}).(*authenticationv1.UserInfo)
	return user
}

// use is a bucket that the caller may do something with.
type use struct {
	name *v1.BucketName
	key  string
	// holder is whose leases the caller speaks for.
	holder            string
	verb, subresource string
}

// permit finds the bucket, if the caller may do this with it. One that is not there and
// one that the caller may not use are refused alike.
func (s *service) permit(ctx context.Context, bucket *v1.BucketName, verb, subresource string) (use, error) {
	if err := checkBucket(bucket); err != nil {
		return use{}, err
	}
	allowed, err := s.may(ctx, bucket, verb, subresource)
	if err != nil {
		return use{}, err
	}
	if !allowed {
		return use{}, notFound(bucket, verb, subresource)
	}
	return s.find(ctx, bucket, verb, subresource)
}

func (s *service) may(ctx context.Context, bucket *v1.BucketName, verb, subresource string) (bool, error) {
	user := callerOf(ctx)
	if user == nil {
		return false, unauthenticated("Nobody is known to call.")
	}
	return s.authorizer.may(ctx, user, verb, subresource, bucket.GetNamespace(), bucket.GetName())
}

func (s *service) find(ctx context.Context, bucket *v1.BucketName, verb, subresource string) (use, error) {
	key, err := s.finder.key(ctx, bucket.GetNamespace(), bucket.GetName())
	if ledger.HasCode(err, ledger.CodeBucketNotFound) {
		return use{}, notFound(bucket, verb, subresource)
	}
	if err != nil {
		return use{}, err
	}
	return use{name: bucket, key: key, holder: callerOf(ctx).Username, verb: verb, subresource: subresource}, nil
}

// done passes a refusal of the ledger on. One that says that the bucket has changed lets
// the next request look for it again.
func (s *service) done(u use, err error) error {
	if ledger.HasCode(err, ledger.CodeBucketNotFound) || ledger.HasCode(err, ledger.CodeBucketClosed) {
		s.finder.forget(u.name.GetNamespace(), u.name.GetName())
	}
	if ledger.HasCode(err, ledger.CodeBucketNotFound) {
		return notFound(u.name, u.verb, u.subresource)
	}
	var refusal *ledger.Error
	if err != nil && !errors.As(err, &refusal) {
		return ledger.Errorf(ledger.CodeUnavailable, "The ledger could not answer.").WithCause(err)
	}
	return err
}

// Reserve implements LedgerServiceHandler.
func (s *service) Reserve(ctx context.Context, r *v1.ReserveRequest) (*v1.ReserveResponse, error) {
	ttl, err := readTTL(r.GetTtl())
	if err != nil {
		return nil, err
	}
	u, err := s.permit(ctx, r.GetBucket(), verbCreate, leasesOf)
	if err != nil {
		return nil, err
	}
	firstAttemptAt, err := readInstant("firstAttemptAt", r.GetFirstAttemptAt())
	if err != nil {
		return nil, err
	}
	fingerprint := r.GetFingerprint()
	if fingerprint == "" {
		fingerprint = r.GetRequestKey()
	}
	result, err := s.ledger.Reserve(ctx, ledger.Reserve{
		Key: u.key, RequestKey: r.GetRequestKey(), Fingerprint: fingerprint, Tokens: r.GetTokens(), TTL: ttl, Holder: u.holder,
		FirstAttemptAt: firstAttemptAt,
	})
	if err != nil {
		return nil, s.expiries.tell(ctx, u.key, s.done(u, err))
	}
	return &v1.ReserveResponse{Lease: writeLease(&result.Lease), Bucket: writeBucket(u.name, &result.Bucket)}, nil
}

// Commit implements LedgerServiceHandler.
func (s *service) Commit(ctx context.Context, r *v1.CommitRequest) (*v1.CommitResponse, error) {
	// An absent figure would be taken for 0, and spent tokens for none.
	if r.ActualTokens == nil {
		return nil, invalid("actualTokens", "is required, also where it is 0.")
	}
	u, err := s.permit(ctx, r.GetBucket(), verbUpdate, leasesOf)
	if err != nil {
		return nil, err
	}
	result, err := s.ledger.Commit(ctx, ledger.Commit{Key: u.key, LeaseID: r.GetLeaseId(), ActualTokens: r.GetActualTokens(), Holder: u.holder})
	if err != nil {
		return nil, s.done(u, err)
	}
	return &v1.CommitResponse{Lease: writeLease(&result.Lease), Bucket: writeBucket(u.name, &result.Bucket)}, nil
}

// Release implements LedgerServiceHandler.
func (s *service) Release(ctx context.Context, r *v1.ReleaseRequest) (*v1.ReleaseResponse, error) {
	result, u, err := s.release(ctx, r)
	if err != nil {
		return nil, err
	}
	return &v1.ReleaseResponse{Lease: writeLease(&result.Lease), Bucket: writeBucket(u.name, &result.Bucket)}, nil
}

// release tries as the holder of the lease first, and as one who may release anybody's
// only if that is not enough, since most callers hold what they release.
func (s *service) release(ctx context.Context, r *v1.ReleaseRequest) (ledger.LeaseResult, use, error) {
	u, refused := s.permit(ctx, r.GetBucket(), verbUpdate, leasesOf)
	if refused == nil {
		result, err := s.ledger.Release(ctx, ledger.Release{Key: u.key, LeaseID: r.GetLeaseId(), Holder: u.holder})
		if err == nil || !ledger.HasCode(err, ledger.CodeLeaseNotFound) {
			return result, u, s.done(u, err)
		}
		refused = err
	}
	switch codeOf(refused) {
	case ledger.CodeBucketNotFound, ledger.CodeLeaseNotFound:
	default:
		return ledger.LeaseResult{}, u, refused
	}
	allowed, err := s.may(ctx, r.GetBucket(), verbDelete, leasesOf)
	if err != nil {
		return ledger.LeaseResult{}, u, err
	}
	if !allowed {
		return ledger.LeaseResult{}, u, refused
	}
	if u, err = s.find(ctx, r.GetBucket(), verbUpdate, leasesOf); err != nil {
		return ledger.LeaseResult{}, u, err
	}
	result, err := s.ledger.Release(ctx, ledger.Release{Key: u.key, LeaseID: r.GetLeaseId()})
	return result, u, s.done(u, err)
}

// Extend implements LedgerServiceHandler.
func (s *service) Extend(ctx context.Context, r *v1.ExtendRequest) (*v1.ExtendResponse, error) {
	ttl, err := readTTL(r.GetTtl())
	if err != nil {
		return nil, err
	}
	u, err := s.permit(ctx, r.GetBucket(), verbUpdate, leasesOf)
	if err != nil {
		return nil, err
	}
	result, err := s.ledger.Extend(ctx, ledger.Extend{Key: u.key, LeaseID: r.GetLeaseId(), TTL: ttl, Holder: u.holder})
	if err != nil {
		return nil, s.done(u, err)
	}
	return &v1.ExtendResponse{Lease: writeLease(&result.Lease), Bucket: writeBucket(u.name, &result.Bucket)}, nil
}

// GetBucket implements LedgerServiceHandler.
func (s *service) GetBucket(ctx context.Context, r *v1.GetBucketRequest) (*v1.GetBucketResponse, error) {
	u, err := s.permit(ctx, r.GetBucket(), verbGet, leasesOf)
	if err != nil {
		return nil, err
	}
	snapshot, err := s.ledger.Inspect(ctx, u.key)
	if err != nil {
		return nil, s.done(u, err)
	}
	return &v1.GetBucketResponse{Bucket: writeBucket(u.name, &snapshot)}, nil
}

// inTurn reads a page in the caller's turn.
func inTurn[T any](ctx context.Context, s *service, read func(context.Context) (T, error)) (page T, err error) {
	err = s.lists.ask(ctx, callerOf(ctx).Username, func(ctx context.Context) (err error) {
		page, err = read(ctx)
		return err
	})
	return page, err
}

// ListLeases implements LedgerServiceHandler.
func (s *service) ListLeases(ctx context.Context, r *v1.ListLeasesRequest) (*v1.ListLeasesResponse, error) {
	size, err := readPageSize(r.GetPageSize())
	if err != nil {
		return nil, err
	}
	after, err := readLeasePlace(r.GetPageToken())
	if err != nil {
		return nil, err
	}
	u, err := s.permit(ctx, r.GetBucket(), verbList, leasesOf)
	if err != nil {
		return nil, err
	}
	leases, err := inTurn(ctx, s, func(ctx context.Context) ([]*ledger.Lease, error) {
		return s.ledger.Store().Leases(ctx, u.key, after, size+1) // one more tells whether there are more
	})
	if err != nil {
		return nil, s.done(u, err)
	}
	page := &v1.ListLeasesResponse{}
	if len(leases) > size {
		leases = leases[:size]
		if page.NextPageToken, err = writeLeasePlace(leases[size-1]); err != nil {
			return nil, err
		}
	}
	for _, lease := range leases {
		page.Leases = append(page.Leases, writeLease(lease))
	}
	return page, nil
}

// ListUsage implements LedgerServiceHandler.
func (s *service) ListUsage(ctx context.Context, r *v1.ListUsageRequest) (*v1.ListUsageResponse, error) {
	query, err := readUsageQuery(r)
	if err != nil {
		return nil, err
	}
	u, err := s.permit(ctx, r.GetBucket(), verbGet, usageOf)
	if err != nil {
		return nil, err
	}
	size := query.Limit
	query.BucketKey, query.Limit = u.key, size+1 // one more tells whether there are more
	lines, err := inTurn(ctx, s, func(ctx context.Context) ([]ledger.Usage, error) { return s.ledger.Store().Usage(ctx, query) })
	if err != nil {
		return nil, s.done(u, err)
	}
	page := &v1.ListUsageResponse{}
	if len(lines) > size {
		lines = lines[:size]
		if page.NextPageToken, err = writeUsagePlace(&lines[size-1]); err != nil {
			return nil, err
		}
	}
	for i := range lines {
		page.Usage = append(page.Usage, writeUsage(&lines[i]))
	}
	return page, nil
}

func readUsageQuery(r *v1.ListUsageRequest) (query ledger.UsageQuery, err error) {
	if query.Limit, err = readPageSize(r.GetPageSize()); err != nil {
		return query, err
	}
	from, err := readInstant("from", r.GetFrom())
	if err != nil {
		return query, err
	}
	to, err := readInstant("to", r.GetTo())
	if err != nil {
		return query, err
	}
	if from != nil {
		query.From = *from
	}
	if to != nil {
		query.To = *to
	}
	query.After, err = readUsagePlace(r.GetPageToken())
	return query, err
}

// ListAudit implements LedgerServiceHandler.
func (s *service) ListAudit(ctx context.Context, r *v1.ListAuditRequest) (*v1.ListAuditResponse, error) {
	size, err := readPageSize(r.GetPageSize())
	if err != nil {
		return nil, err
	}
	if r.GetAfterSequence() < 0 {
		return nil, invalid("afterSequence", "must not be negative.")
	}
	u, err := s.permit(ctx, r.GetBucket(), verbGet, auditOf)
	if err != nil {
		return nil, err
	}
	rows, err := inTurn(ctx, s, func(ctx context.Context) ([]ledger.AuditRow, error) {
		return s.ledger.Store().Audit(ctx, u.key, r.GetAfterSequence(), size)
	})
	if err != nil {
		return nil, s.done(u, err)
	}
	page := &v1.ListAuditResponse{}
	for i := range rows {
		page.Rows = append(page.Rows, writeAudit(&rows[i]))
	}
	return page, nil
}
