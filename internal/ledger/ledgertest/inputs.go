package ledgertest

import (
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/token-lease/operator/internal/ledger"
)

var inputStories = []story{
	{"hashes are the package's", hashesArePackages},
	{"hostile amounts", hostileAmounts},
	{"the largest numbers", largestNumbers},
	{"zero is a number", zeroIsANumber},
	{"hostile keys", hostileKeys},
	{"random keys", randomKeys},
	{"hostile durations", hostileDurations},
	{"invalid requests leave the others alone", invalidAmongValid},
	{"a clock that goes back", clockGoesBack},
	{"instants are cut to milliseconds", instantsAreCut},
	{"stored state is out of reach", storedStateOutOfReach},
}

// Goal: what is stored for a request key and a fingerprint is what the published
// package stores, so that both can read one history.
// Method: golden values, computed with the package's formula in Node, for strings
// that JSON encoders disagree on.
func hashesArePackages(w *world) {
	for _, golden := range []struct {
		bucket, requestKey, fingerprint string
		tokens                          int64
		ttl                             time.Duration
		requestHash, fingerprintHash    string
	}{
		{
			"tenant-a", "request-1", "prompt", 10, time.Minute,
			"861ee5341436cdf7c5453a8b991d423fd016ad98bad08fbc0fd91817ccaba8f5",
			"2b3b6633d5bde8d059956eeb0d6be6e69420477e98aed456d0d8d776f719e86c",
		}, {
			`a"b\c`, `say "hi" \ there`, `"\/`, 1, time.Millisecond,
			"dff72585a04e5c77ab888fddbe7d02be89fd7b2fedef15d4e380ade913490e6f",
			"19da5533b709893cafa56368a9844d75dda6df2954ca50d78ea428a505a6aa7a",
		}, {
			"tenants/pm-4821", "k", "\x00\x01\b\t\n\v\f\r\x1b\x1f\x7f", ledger.MaxTokens, time.Hour,
			"ee847dfe13bdf176660f7a518419729fcd021b191b1041ddde77fd462f33eac8",
			"92d17eafc3d79c2a82e4e3e08c6ab82b97fbe8681ec8ffe6dfdb4ad3b29e0ba9",
		}, {
			"sep\u2028x", "p\u2029q", "\u2028\u2029", 7, 250 * time.Millisecond,
			"68727194c8cf0124bce096fcfa2a8b6bac791e2877bc35080c794610719d2bd6",
			"0a4bf1ead60bd16d0b0d54493dc91df48632630f2b3cf6979523696ee02182ff",
		}, {
			"😀", "🧮 tokens", "𝔘 😀 é", 42, time.Second,
			"096a4a63b71da5703bed297f1cdfc8bcd59a9f288aa1e2d8b04e03ca2e7caf79",
			"1f9ffadc67c0a679cb9d1ddf3d19d25146d29589db3ede93b2d22f5b9b19c445",
		}, {
			"<b>&amp;", "<>&", "</script><!-- & -->", 3, time.Minute,
			"0255080bf9c673970151abbc8bd6bd60b8567a2035979e4e1b442cd883e2059c",
			"f1d7e83cbea18733df37231f06e7f62016d49aa627e738a61426aa1a884a8c9b",
		}, {
			"\u0080\u0085x", "\u00adk", "\u0080\u009f\ufeff\ufffd", 2, time.Minute,
			"a665c73f31f2871aa759ca53f2a1805e88173a68fa9d986c5c6bf46698078a12",
			"7810778c52816fea8dddd5004c66202b2255cff211831cd598a9df1126b12fc7",
		},
	} {
		w.must(ledger.OpenBucket{Key: golden.bucket, Limit: ledger.MaxTokens})
		w.must(ledger.Reserve{
			Key: golden.bucket, RequestKey: golden.requestKey, Fingerprint: golden.fingerprint,
			Tokens: golden.tokens, TTL: golden.ttl,
		})
		leases, err := w.Store().Leases(w.ctx, golden.bucket, ledger.LeasePosition{}, 2)
		if err != nil || len(leases) != 1 {
			w.Fatalf("reading the lease of %q: %v, %v", golden.bucket, leases, err)
		}
		if leases[0].RequestHash.String() != golden.requestHash {
			w.Errorf("%q: request hash %s, want %s", golden.bucket, leases[0].RequestHash, golden.requestHash)
		}
		if leases[0].FingerprintHash.String() != golden.fingerprintHash {
			w.Errorf("%q: fingerprint hash %s, want %s", golden.bucket, leases[0].FingerprintHash, golden.fingerprintHash)
		}
	}
}

// Goal: no amount outside the range is taken, and nothing changes.
func hostileAmounts(w *world) {
	w.open(100)
	lease := w.reserve(10)
	before := w.stored(key)
	for _, amount := range []int64{-1, math.MinInt64, ledger.MaxTokens + 1, math.MaxInt64} {
		reserve := w.reservation(amount)
		for field, request := range map[string]ledger.Request{
			"limit":         ledger.OpenBucket{Key: "new", Limit: amount},
			"expectedLimit": ledger.SetLimit{Key: key, ExpectedLimit: amount, Limit: 1},
			"tokens":        reserve,
			"actualTokens":  ledger.Commit{Key: key, LeaseID: lease.ID, ActualTokens: amount},
		} {
			w.refuse(request, ledger.CodeInvalidInput, map[string]any{"field": field})
		}
		w.refuse(ledger.SetLimit{Key: key, ExpectedLimit: 100, Limit: amount}, ledger.CodeInvalidInput, map[string]any{"field": "limit"})
		w.refuse(w.declaration(amount), ledger.CodeInvalidInput, map[string]any{"field": "limit"})
	}
	w.refuse(w.reservation(0), ledger.CodeInvalidInput, map[string]any{"field": "tokens"})
	after := w.stored(key)
	if after.Revision != before.Revision || after.ReservedTokens != 10 || after.Limit != 100 {
		w.Errorf("hostile amounts changed the bucket from %+v to %+v", before, after)
	}
	if w.raw("new") != nil {
		w.Errorf("a hostile amount opened a bucket")
	}
}

// Goal: sums reach 2^53-1 exactly and never pass it.
func largestNumbers(w *world) {
	w.open(ledger.MaxTokens)
	first := w.reserve(ledger.MaxTokens - 1)
	w.refuse(w.reservation(2), ledger.CodeBudgetExceeded, map[string]any{"availableTokens": int64(1)})
	w.reserve(1)
	w.refuse(ledger.Commit{Key: key, LeaseID: first.ID, ActualTokens: ledger.MaxTokens}, ledger.CodeCommitExceedsBudget,
		map[string]any{"maximumCommit": ledger.MaxTokens - 1})
	w.commit(first, ledger.MaxTokens-1)
	w.refuse(w.reservation(ledger.MaxTokens), ledger.CodeBudgetExceeded, map[string]any{"availableTokens": int64(0)})
	w.wantCounters(ledger.MaxTokens-1, 1)
}

// Goal: 0 means 0 and never "none": a limit of 0 admits nothing, a commit of
// 0 gives everything back.
func zeroIsANumber(w *world) {
	w.open(0)
	w.refuse(w.reservation(1), ledger.CodeBudgetExceeded, map[string]any{"availableTokens": int64(0)})
	w.setLimit(0, 10)
	lease := w.reserve(10)
	w.commit(lease, 0)
	w.wantCounters(0, 0)
	w.refuse(ledger.Commit{Key: key, LeaseID: lease.ID, ActualTokens: 1}, ledger.CodeCommitConflict, map[string]any{"actualTokens": int64(0)})
	w.setLimit(10, 0)
	w.wantLimit(0)
	w.refuse(w.reservation(1), ledger.CodeBudgetExceeded, nil)
	if s := w.stored(key); s.AvailableTokens != 0 || s.OverLimitTokens != 0 {
		w.Errorf("a bucket of 0 shows %+v", s)
	}
}

// Goal: keys that a store cannot hold or tell apart are refused; others are
// exact, to the byte.
func hostileKeys(w *world) {
	for _, hostile := range []string{
		"", " a", "a ", "a\u00a0", "\ufeffa", "\u2028a", "a\x00b", "a\nb", "a\x7f", "\xff\xfe", "a\xed\xa0\x80",
		"cafe\u0301", strings.Repeat("a", 201), strings.Repeat("😀", 101),
	} {
		w.refuse(ledger.OpenBucket{Key: hostile, Limit: 1}, ledger.CodeInvalidInput, map[string]any{"field": "bucket"})
	}
	accepted := []string{
		"caf\u00e9", "Caf\u00e9", "a/b", "A/B", "\u0085a", "a\u200b", "a%", "a_", `a'"; --`,
		strings.Repeat("é", 200), strings.Repeat("😀", 100),
	}
	for i, name := range accepted {
		w.must(ledger.OpenBucket{Key: name, Limit: int64(i)})
	}
	for i, name := range accepted {
		if got := w.stored(name); got.Limit != int64(i) || got.Key != name {
			w.Errorf("bucket %q reads %+v", name, got)
		}
	}
	w.open(100)
	for field, request := range map[string]ledger.Request{
		"requestKey":  ledger.Reserve{Key: key, RequestKey: " k", Fingerprint: "f", Tokens: 1},
		"fingerprint": ledger.Reserve{Key: key, RequestKey: "k", Tokens: 1},
		"operationId": ledger.SetLimit{Key: key, ExpectedLimit: 1, Limit: 1, OperationID: "a\x00b"},
		"actor":       ledger.SetLimit{Key: key, ExpectedLimit: 1, Limit: 1, OperationID: "a", Actor: strings.Repeat("a", 513)},
	} {
		w.refuse(request, ledger.CodeInvalidInput, map[string]any{"field": field})
	}
	w.refuse(ledger.Commit{Key: key, LeaseID: "no spaces"}, ledger.CodeInvalidInput, nil)
	w.refuse(ledger.Reserve{Key: key, RequestKey: strings.Repeat("k", 257), Fingerprint: "f", Tokens: 1}, ledger.CodeInvalidInput, nil)
	w.refuse(ledger.Reserve{Key: key, RequestKey: "k", Fingerprint: strings.Repeat("f", 4097), Tokens: 1}, ledger.CodeInvalidInput, nil)
	w.must(ledger.Reserve{Key: key, RequestKey: strings.Repeat("é", 256), Fingerprint: " \x00" + strings.Repeat("f", 4094), Tokens: 1})
}

// Goal: a key is either refused as invalid or kept exactly, and no two share a
// bucket. Method: random strings of characters that encodings, JSON, SQL and
// collations stumble over, up to the bound and beyond.
func randomKeys(w *world) {
	alphabet := []rune("aA\u00e9e\u0301\u0130\u0131\u00df\u1e9e\u212b\u00c5\uff21\u200d\u200b\u202e\u00a0\ufeff\ufffd\u0000\u001f\u007f\u0085'\"\\%_$;-/\u2028😀𝔘\U0010ffff ")
	plain := []rune("abcdefghijklmnopqrstuvwxyz")
	random := rand.New(rand.NewPCG(20881, 4821))
	limits := map[string]int64{}
	refused := 0
	for range 300 {
		runes := make([]rune, 1+random.IntN(1+random.IntN(220)))
		for i := range runes {
			runes[i] = alphabet[random.IntN(len(alphabet))]
			if random.IntN(3) > 0 {
				runes[i] = plain[random.IntN(len(plain))]
			}
		}
		name := string(runes)
		if _, taken := limits[name]; taken {
			continue
		}
		limit := int64(len(limits)) + 1
		result := w.do(ledger.OpenBucket{Key: name, Limit: limit})[0]
		if result.Err != nil {
			refused++
			w.wantRefusal(result, ledger.CodeInvalidInput, map[string]any{"field": "bucket"})
			continue
		}
		limits[name] = limit
		w.must(ledger.Reserve{Key: name, RequestKey: "r", Fingerprint: name, Tokens: 1})
	}
	if len(limits) == 0 || refused == 0 {
		w.Errorf("%d keys were taken and %d refused: the strings are not what they should be", len(limits), refused)
	}
	for name, limit := range limits {
		if s := w.stored(name); s.Key != name || s.Limit != limit || s.ReservedTokens != 1 {
			w.Errorf("bucket %q reads %+v, want the limit %d and 1 reserved", name, s, limit)
		}
	}
}

// Goal: durations are positive, whole milliseconds, and not beyond the maximum.
func hostileDurations(w *world) {
	w.open(100)
	for _, ttl := range []time.Duration{-1, -time.Second, 1, time.Millisecond + 1, math.MaxInt64} {
		request := w.reservation(1)
		request.TTL = ttl
		w.refuse(request, ledger.CodeInvalidInput, map[string]any{"field": "ttlMs"})
	}
	tooLong := w.reservation(1)
	tooLong.TTL = ledger.DefaultMax + time.Millisecond
	w.refuse(tooLong, ledger.CodeInvalidInput, map[string]any{
		"ttlMs": tooLong.TTL.Milliseconds(), "maxTtlMs": ledger.DefaultMax.Milliseconds(),
	})
	w.reserveFor(1, ledger.DefaultMax)
	w.reserveFor(1, time.Millisecond)
	for _, settings := range []ledger.ReservationSettings{
		{DefaultTTL: time.Hour, MaxTTL: time.Minute},
		{DefaultTTL: 0, MaxTTL: time.Minute},
		{DefaultTTL: time.Minute, MaxTTL: time.Hour, MaxRecords: -1},
	} {
		w.refuse(ledger.OpenBucket{Key: "new", Limit: 1, Settings: settings}, ledger.CodeInvalidInput, nil)
	}
}

// Goal: in one call, an invalid request takes nothing away from the others.
func invalidAmongValid(w *world) {
	w.open(100)
	results := w.do(w.reservation(10), w.reservation(-1), ledger.Inspect{Key: " "}, w.reservation(20))
	w.wantRefusal(results[1], ledger.CodeInvalidInput, nil)
	w.wantRefusal(results[2], ledger.CodeInvalidInput, nil)
	if results[0].Err != nil || results[3].Err != nil {
		w.Errorf("valid requests were refused: %v, %v", results[0].Err, results[3].Err)
	}
	w.wantCounters(0, 30)
}

// Goal: time never runs backwards on a bucket.
// Method: turn the clock back behind the bucket's last change; a lease that was
// not yet due stays, one that was due has gone, and new leases count from there.
func clockGoesBack(w *world) {
	w.open(100)
	start := w.now()
	w.reserveFor(10, time.Minute)
	w.Clock().Advance(10 * time.Minute)
	w.use(1)
	updated := w.now()
	w.Clock().Set(start)
	lease := w.reserveFor(5, time.Minute)
	if !lease.CreatedAt.Equal(updated) || !lease.ExpiresAt.Equal(updated.Add(time.Minute)) {
		w.Errorf("with the clock at %v a lease runs from %v to %v", start, lease.CreatedAt, lease.ExpiresAt)
	}
	if s := w.stored(key); !s.UpdatedAt.Equal(updated) {
		w.Errorf("the bucket went back to %v", s.UpdatedAt)
	}
	w.Clock().Set(updated.Add(59 * time.Second))
	w.touch()
	w.wantLease(lease.ID, ledger.LeaseReserved)
	w.Clock().Advance(time.Second)
	w.touch()
	w.wantLease(lease.ID, ledger.LeaseExpired)
}

// Goal: an instant is never stored later than asked, and what was cut off makes no
// difference when it is asked again.
// Method: fractions that a store could round up, or see as another instant.
func instantsAreCut(w *world) {
	w.declare(normalLimit)
	for i, fraction := range []time.Duration{1, 999_900, 499_999, 500_000, 999_999} {
		uid := fmt.Sprintf("raise-%d", i)
		from, until := time.Duration(2*i)*time.Minute, time.Duration(2*i+1)*time.Minute
		startsAt, expiresAt := w.now().Add(from+fraction), w.now().Add(until+fraction)
		request := w.raiseFrom(uid, 0, 0, func(r *ledger.StoreRaise) {
			r.Grant.StartsAt, r.Grant.ExpiresAt = &startsAt, expiresAt
		})
		raise := w.store(request)
		if !raise.StartsAt.Equal(w.now().Add(from)) || !raise.ExpiresAt.Equal(w.now().Add(until)) {
			w.Errorf("a window of [%v, %v) was stored as [%v, %v)", startsAt, expiresAt, raise.StartsAt, raise.ExpiresAt)
		}
		before, rows := w.raise(uid), len(w.audit())
		for range 20 {
			w.store(request)
		}
		// The same millisecond is the same instant, whichever part of it is asked for.
		for _, other := range []time.Duration{0, 1, 999_999} {
			request.Grant.ExpiresAt = w.now().Add(until + other)
			w.store(request)
		}
		if again := w.raise(uid); again.Version != before.Version || !again.ExpiresAt.Equal(before.ExpiresAt) || len(w.audit()) != rows {
			w.Errorf("storing it again made %+v of %+v", again, before)
		}
	}
	w.wantIdle(1)
}

// Goal: what a caller does with an answer, or with what it passed in, changes
// nothing that is stored.
func storedStateOutOfReach(w *world) {
	request := w.declaration(normalLimit)
	snapshot := w.must(request).Snapshot
	*snapshot.DeclaredLimit, snapshot.Owner.Name, snapshot.Limit = 1, "changed", 1
	grant := w.raiseFrom("raise-1", 0, time.Minute)
	raise := w.store(grant)
	*raise.AppliedLimit, *raise.RestoreTo, raise.State = 1, 1, ledger.RaiseFailed
	*grant.Grant.StartsAt = w.now().Add(time.Hour)
	lease := w.reserve(10)
	lease.State, lease.ReservedTokens = ledger.LeaseReleased, 1
	rows := w.audit()
	*rows[0].EffectiveLimit = 1

	stored := w.stored(key)
	if *stored.DeclaredLimit != normalLimit || stored.Owner.Name != bucketName || stored.Limit != temporaryLimit {
		w.Errorf("the stored bucket reads %+v", stored)
	}
	*stored.ActiveRaise.AppliedLimit = 2
	if again := w.raise("raise-1"); *again.AppliedLimit != temporaryLimit || *again.RestoreTo != normalLimit || !again.StartsAt.Equal(w.now()) {
		w.Errorf("the stored raise reads %+v", again)
	}
	if again := w.lease(lease.ID); again.State != ledger.LeaseReserved || again.ReservedTokens != 10 {
		w.Errorf("the stored lease reads %+v", again)
	}
	if *w.audit()[0].EffectiveLimit != normalLimit {
		w.Errorf("the stored audit changed")
	}
}
