package postgres

import (
	"time"

	"github.com/jackc/pgx/v5/pgtype"
)

// column lists one value of each row, for a set-based write.
func column[Row, Value any](rows []Row, value func(Row) Value) []Value {
	values := make([]Value, len(rows))
	for i, row := range rows {
		values[i] = value(row)
	}
	return values
}

// optional turns "" into NULL: what is absent is NULL in SQL.
func optional[T ~string](text T) *string {
	if text == "" {
		return nil
	}
	s := string(text)
	return &s
}

// optionalTime turns the zero time into NULL.
func optionalTime(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	return &t
}

// text reads a column that may be NULL into a string.
type text[T ~string] struct{ into *T }

// ScanText implements pgtype.TextScanner.
func (t text[T]) ScanText(v pgtype.Text) error {
	*t.into = T(v.String)
	return nil
}

// into makes a scan target of a string whose column may be NULL.
func into[T ~string](target *T) text[T] { return text[T]{target} }

// instant reads a timestamp in UTC; infinity and NULL become the zero time. -infinity
// is long ago: so the schema, or another hand, says that nothing was done yet. Where it
// stands for the time before the first period it is not read by this.
type instant struct{ into *time.Time }

// ScanTimestamptz implements pgtype.TimestamptzScanner.
func (i instant) ScanTimestamptz(v pgtype.Timestamptz) error {
	*i.into = time.Time{}
	switch {
	case v.Valid && v.InfinityModifier == pgtype.Finite:
		*i.into = v.Time.UTC()
	case v.Valid && v.InfinityModifier == pgtype.NegativeInfinity:
		*i.into = time.Unix(0, 0).UTC()
	}
	return nil
}

// optionalInstant reads a timestamp in UTC; NULL becomes nil.
type optionalInstant struct{ into **time.Time }

// ScanTimestamptz implements pgtype.TimestamptzScanner.
func (i optionalInstant) ScanTimestamptz(v pgtype.Timestamptz) error {
	*i.into = nil
	if v.Valid {
		t := v.Time.UTC()
		*i.into = &t
	}
	return nil
}

// milliseconds reads a duration that is kept in whole milliseconds.
type milliseconds struct{ into *time.Duration }

// ScanInt64 implements pgtype.Int64Scanner.
func (m milliseconds) ScanInt64(v pgtype.Int8) error {
	*m.into = time.Duration(v.Int64) * time.Millisecond
	return nil
}

// orInfinity is the timestamp that stands for "never" when t is zero.
func orInfinity(t time.Time) pgtype.Timestamptz {
	if t.IsZero() {
		return pgtype.Timestamptz{InfinityModifier: pgtype.Infinity, Valid: true}
	}
	return pgtype.Timestamptz{Time: t, Valid: true}
}
