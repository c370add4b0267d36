package main

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/token-lease/operator/internal/ledger"
)

// generator makes up one sequence. It knows nothing of the rules; it only sees to it
// that steps meet: few buckets, few request keys, small limits.
type generator struct {
	*rand.Rand
	now      time.Time
	settings ledger.ReservationSettings
	buckets  []string
	steps    []step
	// reserves are the steps that may have made a lease.
	reserves []int
}

var epoch = time.Date(2026, time.November, 30, 18, 0, 0, 0, time.UTC)

// generate makes the n-th sequence of a seed.
func generate(seed int64, n, steps int) sequence {
	g := &generator{Rand: rand.New(rand.NewPCG(uint64(seed), uint64(n))), now: epoch}
	g.settings = ledger.ReservationSettings{
		DefaultTTL: g.ttlOf(1, 60_000), MaxRecords: pick(g, []int64{3, 5, 10, 10_000}),
	}
	g.settings.MaxTTL = g.settings.DefaultTTL + g.ttlOf(0, 120_000)
	prefix := fmt.Sprintf(generatedPlace, n)
	g.buckets = []string{
		prefix + "a", prefix + pick(g, []string{"b", "ключ", "emoji \U0001F600", `quote"back\slash`, "<&>\u2028\u2029", "é"}),
	}
	for range steps {
		g.step(prefix)
	}
	return sequence{prefix, g.settings, g.steps}
}

func pick[T any](g *generator, from []T) T { return from[g.IntN(len(from))] }

// chance is true so many times in a hundred.
func (g *generator) chance(percent int) bool { return g.IntN(100) < percent }

func (g *generator) ttlOf(least, most int) time.Duration {
	return time.Duration(least+g.IntN(most-least+1)) * time.Millisecond
}

func (g *generator) step(prefix string) {
	g.moveClock()
	s := step{clock: g.now, lease: -1, bucket: g.buckets[0]}
	if g.chance(25) {
		s.bucket = g.buckets[1]
	}
	if g.chance(3) {
		s.bucket = g.hostileKey(prefix, 200)
	}
	switch roll := g.IntN(100); {
	case len(g.steps) == 0 || roll < 8:
		s.verb, s.limit = openBucket, g.amount(pick(g, []int64{100, 1000}))
	case roll < 48:
		g.reserve(&s)
	case roll < 70:
		s.verb, s.actual = commit, g.amount(int64(g.IntN(80)))
		g.lease(&s)
	case roll < 80:
		s.verb = release
		g.lease(&s)
	case roll < 88:
		s.verb, s.expected, s.limit = setLimit, g.amount(pick(g, []int64{100, 1000, 50})), g.amount(pick(g, []int64{100, 1000, 50}))
	case roll < 94:
		s.verb = reapExpired
	default:
		s.verb = inspect
	}
	g.steps = append(g.steps, s)
}

// moveClock steps on, stands, jumps to an expiry or just beside it, or goes back.
func (g *generator) moveClock() {
	switch roll := g.IntN(100); {
	case roll < 40:
	case roll < 75:
		g.now = g.now.Add(g.ttlOf(1, 5_000))
	case roll < 92 && len(g.reserves) > 0:
		s := g.steps[pick(g, g.reserves)]
		ttl := s.ttl
		if ttl <= 0 {
			ttl = g.settings.DefaultTTL
		}
		if at := s.clock.Add(min(ttl, time.Hour).Truncate(time.Millisecond)).Add(g.ttlOf(0, 2) - time.Millisecond); at.After(g.now) {
			g.now = at
		}
	case roll < 97:
		g.now = g.now.Add(-g.ttlOf(1, 30_000))
	default:
		g.now = g.now.Add(g.ttlOf(60_000, 3_600_000))
	}
}

func (g *generator) reserve(s *step) {
	s.verb, s.requestKey, s.fingerprint = reserve, fmt.Sprint("request-", g.IntN(14)), pick(g, []string{"f", "f", "f", "g"})
	s.tokens = g.amount(int64(1 + g.IntN(60)))
	switch roll := g.IntN(100); {
	case roll < 50:
	case roll < 92:
		s.ttl = g.ttlOf(1, int(g.settings.MaxTTL.Milliseconds()))
	case roll < 95:
		s.ttl = g.settings.MaxTTL + g.ttlOf(0, 1)
	default:
		s.ttl = pick(g, []time.Duration{-time.Millisecond, time.Microsecond, 1500 * time.Microsecond, 1_000_000 * time.Hour, g.settings.DefaultTTL})
	}
	switch {
	case len(g.reserves) > 0 && g.chance(25):
		// The same again, or nearly.
		earlier := g.steps[pick(g, g.reserves)]
		s.bucket, s.requestKey, s.fingerprint, s.tokens, s.ttl = earlier.bucket, earlier.requestKey, earlier.fingerprint, earlier.tokens, earlier.ttl
		if g.chance(30) {
			s.ttl = pick(g, []time.Duration{0, g.settings.DefaultTTL, g.settings.MaxTTL + time.Millisecond})
		}
		if g.chance(20) {
			s.tokens++
		}
	case g.chance(4):
		s.requestKey = g.hostileKey("", 256)
	case g.chance(4):
		s.fingerprint = pick(g, []string{"", strings.Repeat("x", 4096), strings.Repeat("x", 4097), "\x00\x1f\x7f", strings.Repeat("\U0001F600", 2049), " f "})
	}
	g.reserves = append(g.reserves, len(g.steps))
}

func (g *generator) lease(s *step) {
	if len(g.reserves) == 0 || g.chance(5) {
		s.leaseID = pick(g, []string{"", "unknown", "-begins-badly", "with space", strings.Repeat("x", 128), strings.Repeat("x", 129), "ünïcode", "a/b"})
		return
	}
	s.lease = pick(g, g.reserves)
	s.bucket = g.steps[s.lease].bucket
}

// amount is mostly the given figure, and sometimes one at a border.
func (g *generator) amount(usual int64) int64 {
	if !g.chance(4) {
		return usual
	}
	const most = ledger.MaxTokens
	return pick(g, []int64{0, 1, -1, most, most - 1, most + 1, most + 2, 1 << 62, -1 << 63, 1<<63 - 1})
}

// hostileKey is at the border of what a name may be, or beyond it.
func (g *generator) hostileKey(prefix string, longest int) string {
	room := longest - len(prefix)
	return pick(g, []string{
		"", " ", prefix + strings.Repeat("k", room), prefix + strings.Repeat("k", room+1),
		prefix + strings.Repeat("\U0001F600", room/2), prefix + strings.Repeat("\U0001F600", room/2) + "xx",
		" " + prefix + "k", prefix + "k ", prefix + "k\u00a0", "\ufeff" + prefix + "k", prefix + "k\u2003", prefix + "k\u0085",
		prefix + "k\u180e", prefix + "a\x00b", prefix + "a\x1fb", prefix + "a\x7fb", prefix + "a\tb", prefix + "a\u0080b",
		prefix + "e\u0301", prefix + "\u00e9", prefix + "__proto__", prefix + "\ufffd",
	})
}
