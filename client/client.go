package client

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"time"

	"connectrpc.com/connect"
	"github.com/google/uuid"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	v1 "github.com/token-lease/operator/proto/tokenlease/v1alpha1"
	"github.com/token-lease/operator/proto/tokenlease/v1alpha1/tokenleasev1alpha1connect"
)

// maxAnswerBytes bounds what is read of an answer; the largest is a page of leases.
const maxAnswerBytes = 4 << 20

// Options say how to reach the data plane. URL and TokenFile are required.
type Options struct {
	// URL is the data plane's, such as https://tokenlease.tokenlease-system.svc.
	URL string
	// TokenFile holds a ServiceAccount token for the data plane's audience. It is read
	// again as it is renewed.
	TokenFile string
	// CAFile holds the certificates (PEM) that the data plane's must be signed by. Empty
	// means those that the system trusts. It is read once.
	CAFile string
	// HTTPClient is used instead of one made from CAFile. Leave its Timeout at 0: Retry
	// has one for each attempt.
	HTTPClient *http.Client
	// Retry bounds how calls are repeated.
	Retry Retry
	// SettleTimeout bounds how long Do goes on trying to settle after the work has ended,
	// also after its context has. Default: 2 minutes.
	SettleTimeout time.Duration
}

// Client calls the data plane. It is safe for concurrent use.
type Client struct {
	service       tokenleasev1alpha1connect.LedgerServiceClient
	tokens        *tokenFile
	retry         Retry
	settleTimeout time.Duration
}

// New returns a client. It reads the files but calls nobody.
func New(o Options) (*Client, error) {
	target, err := url.Parse(o.URL)
	if err != nil || target.Host == "" || target.Scheme != "https" {
		// A token must not be shown without TLS.
		return nil, fmt.Errorf("the URL of the data plane must begin with https:// and name a host, not %q", o.URL)
	}
	if o.TokenFile == "" {
		return nil, errors.New("a TokenFile is required")
	}
	c := &Client{tokens: &tokenFile{path: o.TokenFile}, retry: o.Retry.orDefault(), settleTimeout: o.SettleTimeout}
	if c.settleTimeout <= 0 {
		c.settleTimeout = 2 * time.Minute
	}
	if _, err := c.tokens.get(true); err != nil {
		return nil, err
	}
	if o.HTTPClient == nil {
		if o.HTTPClient, err = newHTTPClient(o.CAFile); err != nil {
			return nil, err
		}
	}
	c.service = tokenleasev1alpha1connect.NewLedgerServiceClient(o.HTTPClient, o.URL,
		connect.WithReadMaxBytes(maxAnswerBytes), connect.WithInterceptors(connect.UnaryInterceptorFunc(c.showToken)))
	return c, nil
}

func newHTTPClient(caFile string) (*http.Client, error) {
	config := &tls.Config{MinVersion: tls.VersionTLS12}
	if caFile != "" {
		certificates, err := os.ReadFile(caFile) //nolint:gosec // whoever makes the client names its certificates
		if err != nil {
			return nil, fmt.Errorf("read the certificates: %w", err)
		}
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM(certificates) {
			return nil, fmt.Errorf("%s holds no certificate", caFile)
		}
	}
	return &http.Client{
		// A token goes where it was meant to go, and not where an answer says.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		Transport: &http.Transport{
			TLSClientConfig: config, ForceAttemptHTTP2: true, Proxy: http.ProxyFromEnvironment,
			TLSHandshakeTimeout: 5 * time.Second, IdleConnTimeout: 90 * time.Second, MaxIdleConnsPerHost: 16,
			// A connection to a replica that is gone without a word is noticed.
			HTTP2: &http.HTTP2Config{SendPingTimeout: 10 * time.Second, PingTimeout: 5 * time.Second},
		},
	}, nil
}

// Service gives the whole of LedgerService, for listing leases and evidence. It shows
// the token and repeats nothing.
func (c *Client) Service() tokenleasev1alpha1connect.LedgerServiceClient { return c.service }

// Bucket names a bucket by its TokenBucket.
type Bucket struct{ Namespace, Name string }

func (b Bucket) name() *v1.BucketName { return &v1.BucketName{Namespace: b.Namespace, Name: b.Name} }

// Request asks for a reservation.
type Request struct {
	Bucket Bucket
	// Tokens is the estimate, from 1 to 2^53-1.
	Tokens int64
	// TTL is how long the reservation lives, in whole milliseconds; 0 means the bucket's
	// default.
	TTL time.Duration
	// RequestKey names the work, so that it is reserved once however often it is asked
	// for, also by another process. Empty makes one up, which holds for this call alone.
	RequestKey string
	// Fingerprint says what the work is; a repetition must bring the same. Optional.
	Fingerprint string
	// FirstAttemptAt is when a RequestKey was used first. The server refuses one that is
	// older than what it remembers, instead of taking it for a new one. Optional.
	FirstAttemptAt time.Time
}

// LeaseState is where a lease stands.
type LeaseState string

// States of a lease. The last three are final, but that a bucket which records actual
// figures also books those of an expired one.
const (
	Reserved  LeaseState = "reserved"
	Committed LeaseState = "committed"
	Released  LeaseState = "released"
	Expired   LeaseState = "expired"
)

// Lease is one reservation.
type Lease struct {
	Bucket Bucket
	ID     string
	State  LeaseState
	// ReservedTokens is the estimate; ActualTokens is what was committed, nil before.
	ReservedTokens int64
	ActualTokens   *int64
	// TTL is how long it was reserved for; what it was extended by does not count.
	TTL time.Duration
	// CreatedAt and ExpiresAt are the ledger's time, not this machine's.
	CreatedAt, ExpiresAt time.Time
}

// Figures are a bucket's, in tokens.
type Figures struct{ Limit, Used, Reserved, Available, OverLimit int64 }

// Reserve takes tokens of a bucket. The lease is as it stands, also if the request key
// was used before.
func (c *Client) Reserve(ctx context.Context, r Request) (*Lease, error) {
	answer, err := repeat(ctx, c, c.service.Reserve, reserveRequest(r))
	if err != nil {
		return nil, err
	}
	return readLease(r.Bucket, answer.GetLease())
}

// reserveRequest makes the request once, so that all its repetitions have one key.
func reserveRequest(r Request) *v1.ReserveRequest {
	if r.RequestKey == "" {
		r.RequestKey = uuid.NewString()
	}
	request := &v1.ReserveRequest{
		Bucket: r.Bucket.name(), RequestKey: r.RequestKey, Fingerprint: r.Fingerprint, Tokens: r.Tokens, Ttl: writeTTL(r.TTL),
	}
	if !r.FirstAttemptAt.IsZero() {
		request.FirstAttemptAt = timestamppb.New(r.FirstAttemptAt)
	}
	return request
}

// Commit settles a lease with what was really used.
func (c *Client) Commit(ctx context.Context, bucket Bucket, leaseID string, actualTokens int64) (*Lease, error) {
	answer, err := repeat(ctx, c, c.service.Commit, &v1.CommitRequest{Bucket: bucket.name(), LeaseId: leaseID, ActualTokens: &actualTokens})
	if err != nil {
		return nil, err
	}
	return readLease(bucket, answer.GetLease())
}

// Release gives a reservation back unused.
func (c *Client) Release(ctx context.Context, bucket Bucket, leaseID string) (*Lease, error) {
	answer, err := repeat(ctx, c, c.service.Release, &v1.ReleaseRequest{Bucket: bucket.name(), LeaseId: leaseID})
	if err != nil {
		return nil, err
	}
	return readLease(bucket, answer.GetLease())
}

// Extend lets a lease live for so long from now, at least; 0 means the bucket's default.
func (c *Client) Extend(ctx context.Context, bucket Bucket, leaseID string, ttl time.Duration) (*Lease, error) {
	answer, err := repeat(ctx, c, c.service.Extend, &v1.ExtendRequest{Bucket: bucket.name(), LeaseId: leaseID, Ttl: writeTTL(ttl)})
	if err != nil {
		return nil, err
	}
	return readLease(bucket, answer.GetLease())
}

// Figures reads a bucket's.
func (c *Client) Figures(ctx context.Context, bucket Bucket) (Figures, error) {
	answer, err := repeat(ctx, c, c.service.GetBucket, &v1.GetBucketRequest{Bucket: bucket.name()})
	if err != nil {
		return Figures{}, err
	}
	b := answer.GetBucket()
	return Figures{
		Limit: b.GetLimitTokens(), Used: b.GetUsedTokens(), Reserved: b.GetReservedTokens(),
		Available: b.GetAvailableTokens(), OverLimit: b.GetOverLimitTokens(),
	}, nil
}

func writeTTL(ttl time.Duration) *durationpb.Duration {
	if ttl == 0 {
		return nil
	}
	return durationpb.New(ttl)
}

func readLease(bucket Bucket, l *v1.Lease) (*Lease, error) {
	states := map[v1.LeaseState]LeaseState{
		v1.LeaseState_LEASE_STATE_RESERVED: Reserved, v1.LeaseState_LEASE_STATE_COMMITTED: Committed,
		v1.LeaseState_LEASE_STATE_RELEASED: Released, v1.LeaseState_LEASE_STATE_EXPIRED: Expired,
	}
	state, known := states[l.GetState()]
	if !known || l.GetId() == "" {
		return nil, notUnderstood("the server answered with a lease in the state %s", l.GetState())
	}
	return &Lease{
		Bucket: bucket, ID: l.GetId(), State: state, ReservedTokens: l.GetReservedTokens(), ActualTokens: l.ActualTokens,
		TTL: l.GetTtl().AsDuration(), CreatedAt: readInstant(l.GetCreatedAt()), ExpiresAt: readInstant(l.GetExpiresAt()),
	}, nil
}

func readInstant(t *timestamppb.Timestamp) time.Time { return t.AsTime() }
