package postgres

import (
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/token-lease/operator/internal/ledger"
)

// neededPeriods reads the ended periods that leases were reserved in, and those of
// the keys in $3 in which something is reserved still.
const neededPeriods = `
SELECT p.bucket_key, p.started_at, p.ended_at, p.limit_tokens, p.used_tokens, p.reserved_tokens
FROM unnest($1::text[], $2::timestamptz[]) AS needed (bucket_key, started_at)
CROSS JOIN LATERAL (
	SELECT * FROM tokenlease.periods AS one
	WHERE one.bucket_key = needed.bucket_key AND one.started_at = needed.started_at
	OFFSET 0) AS p
UNION
SELECT p.bucket_key, p.started_at, p.ended_at, p.limit_tokens, p.used_tokens, p.reserved_tokens
FROM tokenlease.periods AS p
WHERE p.bucket_key = ANY ($3::text[]) AND p.reserved_tokens > 0`

const insertPeriods = `
INSERT INTO tokenlease.periods (bucket_key, started_at, ended_at, limit_tokens, used_tokens, reserved_tokens)
SELECT * FROM unnest($1::text[], $2::timestamptz[], $3::timestamptz[], $4::bigint[], $5::bigint[], $6::bigint[])`

const updatePeriods = `
WITH written AS (
	UPDATE tokenlease.periods AS p SET used_tokens = new.used_tokens, reserved_tokens = new.reserved_tokens
	FROM unnest($1::text[], $2::timestamptz[], $3::bigint[], $4::bigint[])
		AS new (bucket_key, started_at, used_tokens, reserved_tokens)
	WHERE p.bucket_key = new.bucket_key AND p.started_at = new.started_at
	RETURNING 1)
SELECT tokenlease.require((SELECT count(*) FROM written), cardinality($1::text[]), 'periods updated')`

// deletePeriods removes what a bucket leaves behind, as deleteLeases does.
const deletePeriods = `DELETE FROM tokenlease.periods WHERE bucket_key = ANY ($1::text[])`

// periodStart is how the start of a period stands in its key: the time before the
// first period began long ago.
func periodStart(t time.Time) pgtype.Timestamptz {
	if t.IsZero() {
		return pgtype.Timestamptz{InfinityModifier: pgtype.NegativeInfinity, Valid: true}
	}
	return pgtype.Timestamptz{Time: t, Valid: true}
}

func scanPeriod(row pgx.Row) (*ledger.Period, error) {
	var p ledger.Period
	var start pgtype.Timestamptz
	err := row.Scan(&p.BucketKey, &start, instant{&p.EndedAt}, &p.Limit, &p.UsedTokens, &p.ReservedTokens)
	if err == nil && start.InfinityModifier == pgtype.Finite {
		p.StartedAt = start.Time.UTC()
	}
	return &p, err
}

// neededPeriodsOf are the arguments of neededPeriods. Hardly any transaction needs
// them: only those that settle what was reserved before the latest roll.
func (l *loader) neededPeriodsOf() (keys []string, starts []pgtype.Timestamptz, live []string) {
	known := map[string]map[time.Time]bool{}
	for key, view := range l.views {
		if view.Bucket == nil {
			continue
		}
		for _, lease := range view.Leases {
			if lease.PeriodStart.Equal(view.Bucket.PeriodStart) || known[key][lease.PeriodStart] {
				continue
			}
			if known[key] == nil {
				known[key] = map[time.Time]bool{}
			}
			known[key][lease.PeriodStart] = true
			keys, starts = append(keys, key), append(starts, periodStart(lease.PeriodStart))
		}
		if l.livePeriods[key] {
			live = append(live, key)
		}
	}
	return keys, starts, live
}

// queuePeriods queues the periods that the views need beside their leases.
func (l *loader) queuePeriods(batch *pgx.Batch) {
	keys, starts, live := l.neededPeriodsOf()
	if len(keys) == 0 && len(live) == 0 {
		return
	}
	// Without elements a slice must not become NULL.
	keys, starts, live = append([]string{}, keys...), append([]pgtype.Timestamptz{}, starts...), append([]string{}, live...)
	each(batch.Queue(neededPeriods, keys, starts, live), func(rows pgx.Rows) error {
		period, err := scanPeriod(rows)
		if err != nil {
			return err
		}
		view := l.view(period.BucketKey)
		view.Periods = append(view.Periods, period)
		return nil
	})
}

// periodWrites collects the periods of all buckets of a transaction.
type periodWrites struct {
	clear          []string
	insert, update []*ledger.Period
}

func (w *periodWrites) add(view *ledger.View, effects *ledger.Effects) {
	switch effects.Row {
	case ledger.RowDelete, ledger.RowInsert:
		w.clear = append(w.clear, view.Key)
	case ledger.RowUnchanged, ledger.RowUpdate:
	}
	w.insert = append(w.insert, effects.InsertPeriods...)
	w.update = append(w.update, effects.UpdatePeriods...)
}

func (w *periodWrites) queue(batch *pgx.Batch) {
	key := func(p *ledger.Period) string { return p.BucketKey }
	start := func(p *ledger.Period) pgtype.Timestamptz { return periodStart(p.StartedAt) }
	used := func(p *ledger.Period) int64 { return p.UsedTokens }
	reserved := func(p *ledger.Period) int64 { return p.ReservedTokens }
	if len(w.clear) > 0 {
		batch.Queue(deletePeriods, w.clear)
	}
	if len(w.insert) > 0 {
		batch.Queue(insertPeriods, column(w.insert, key), column(w.insert, start),
			column(w.insert, func(p *ledger.Period) time.Time { return p.EndedAt }),
			column(w.insert, func(p *ledger.Period) int64 { return p.Limit }),
			column(w.insert, used), column(w.insert, reserved))
	}
	if len(w.update) > 0 {
		batch.Queue(updatePeriods, column(w.update, key), column(w.update, start), column(w.update, used), column(w.update, reserved))
	}
}
