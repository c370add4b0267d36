package ledger

import (
	"crypto/sha256"
	"encoding/hex"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"
)

// MaxTokens is the largest count that every JSON client reads exactly: 2^53-1.
// It bounds limits, reservations and their sums.
const MaxTokens int64 = 1<<53 - 1

// Bounds of the strings that the ledger keeps, in UTF-16 units.
const (
	MaxBucketKeyLength   = 200
	MaxRequestKeyLength  = 256
	MaxFingerprintLength = 4096
	MaxIdentifierLength  = 128 // tenant ID, scoped key ID, approval ID
	MaxNameLength        = 253 // a Kubernetes object name, namespace or UID
	MaxActorLength       = 512
	MaxPurposeLength     = 1024 // 512 characters, each of which may count twice
	MaxOperationIDLength = 256
)

// Defaults of a bucket's reservations, as the package has them.
const (
	DefaultTTL = 60 * time.Second
	DefaultMax = time.Hour
)

// maxInstant bounds every instant that is taken in. It lies far inside what Go,
// JSON, PostgreSQL and JavaScript can express.
var maxInstant = time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC)

// Truncate brings an instant to the ledger's resolution: milliseconds, cut off
// and never rounded up, in UTC.
func Truncate(t time.Time) time.Time {
	return t.UTC().Truncate(time.Millisecond)
}

// later returns the later of two instants.
func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// ValidateBucketKey refuses a key that is not 1..200 UTF-16 units, trimmed as
// JavaScript does, free of control characters and in NFC. Two keys that look
// the same must not hold two budgets.
func ValidateBucketKey(key string) error {
	if err := identifier("bucket", key, MaxBucketKeyLength); err != nil || isPlain(key) {
		return err
	}
	if !norm.NFC.IsNormalString(key) {
		return invalid("bucket", "bucket must be in Unicode normalisation form NFC; write accented characters in their composed form")
	}
	return nil
}

// ValidateClusterID refuses an identity of a cluster that no owner in the ledger
// could have: it must be 1..MaxNameLength UTF-16 units, trimmed, free of control
// characters.
func ValidateClusterID(id string) error { return identifier("cluster ID", id, MaxNameLength) }

func validateLeaseID(id string) error {
	if !isLeaseID(id) {
		return Errorf(CodeInvalidInput, "leaseId must contain only letters, numbers, dot, underscore, colon, or hyphen.")
	}
	return nil
}

// maxLeaseIDLength is the longest ID that the package makes or takes.
const maxLeaseIDLength = 128

// isLeaseID reports whether a string is a letter or digit and up to 127 more letters,
// digits, dots, underscores, colons and hyphens.
func isLeaseID(id string) bool {
	for i := range len(id) {
		switch c := id[i]; {
		case c >= '0' && c <= '9', c >= 'A' && c <= 'Z', c >= 'a' && c <= 'z':
		case i > 0 && (c == '.' || c == '_' || c == ':' || c == '-'):
		default:
			return false
		}
	}
	return id != "" && len(id) <= maxLeaseIDLength
}

// identifier checks a string that is stored as it is.
func identifier(field, value string, maximum int) error {
	if value != "" && len(value) <= maximum && isPlain(value) {
		return nil
	}
	if value == "" || !utf8.ValidString(value) || utf16Length(value) > maximum ||
		trimJS(value) != value || strings.ContainsFunc(value, isControl) {
		return Errorf(CodeInvalidInput,
			"%s must be a trimmed, non-empty string of at most %d UTF-16 units without control characters.", field, maximum).
			WithDetails(map[string]any{"field": field, "maximumLength": int64(maximum)})
	}
	return nil
}

// isPlain reports whether a string is of visible ASCII alone, as nearly all are: then
// there is nothing to trim, to normalise or to refuse in it.
func isPlain(s string) bool {
	for i := range len(s) {
		if s[i] <= ' ' || s[i] > '~' {
			return false
		}
	}
	return true
}

// optionalIdentifier is identifier for a field that may be empty.
func optionalIdentifier(field, value string, maximum int) error {
	if value == "" {
		return nil
	}
	return identifier(field, value, maximum)
}

// optionalLine checks text for people: one line, which may be empty.
func optionalLine(field, value string, maximum int) error {
	if !utf8.ValidString(value) || utf16Length(value) > maximum || strings.ContainsFunc(value, isControl) {
		return Errorf(CodeInvalidInput, "%s must be one line of at most %d UTF-16 units without control characters.", field, maximum).
			WithDetails(map[string]any{"field": field, "maximumLength": int64(maximum)})
	}
	return nil
}

// boundedSecret checks a string that is only ever hashed.
func boundedSecret(field, value string, maximum int) error {
	if value == "" || !utf8.ValidString(value) || utf16Length(value) > maximum {
		return Errorf(CodeInvalidInput, "%s must be a non-empty string of at most %d UTF-16 units.", field, maximum).
			WithDetails(map[string]any{"field": field, "maximumLength": int64(maximum)})
	}
	return nil
}

func counter(field string, value int64) error {
	if value < 0 || value > MaxTokens {
		return invalid(field, "%s must be a whole number from 0 to %d.", field, MaxTokens)
	}
	return nil
}

func positive(field string, value int64) error {
	if err := counter(field, value); err != nil {
		return err
	}
	if value == 0 {
		return invalid(field, "%s must be greater than zero.", field)
	}
	return nil
}

// milliseconds checks a duration that the ledger keeps in whole milliseconds.
func milliseconds(field string, d time.Duration) error {
	if d <= 0 || d%time.Millisecond != 0 {
		return invalid(field, "%s must be a positive number of whole milliseconds.", field)
	}
	return nil
}

func instant(field string, t time.Time) error {
	if t.Before(time.Unix(0, 0)) || t.After(maxInstant) {
		return invalid(field, "%s must lie between 1970 and 9999.", field)
	}
	return nil
}

// utf16Length counts as JavaScript's String.length does.
func utf16Length(s string) int {
	n := 0
	for _, r := range s {
		n++
		if r > 0xFFFF {
			n++
		}
	}
	return n
}

func isControl(r rune) bool { return r <= 0x1F || r == 0x7F }

// trimJS removes what JavaScript's String.prototype.trim removes: WhiteSpace and
// LineTerminator of ECMA-262, which is not unicode.IsSpace (U+0085 stays, U+FEFF
// goes).
func trimJS(s string) string { return strings.TrimFunc(s, isJSSpace) }

func isJSSpace(r rune) bool {
	switch {
	case r >= 0x09 && r <= 0x0D, r == ' ', r == 0xA0, r == 0x1680, r >= 0x2000 && r <= 0x200A,
		r == 0x2028, r == 0x2029, r == 0x202F, r == 0x205F, r == 0x3000, r == 0xFEFF:
		return true
	default:
		return false
	}
}

// Hash is a SHA-256. Request keys and fingerprints are kept as nothing else.
type Hash [sha256.Size]byte

// String returns the hash in lower-case hex, as the package stores it.
func (h Hash) String() string { return hex.EncodeToString(h[:]) }

// requestHash is what the package stores for a request key:
// SHA-256 of JSON.stringify([bucket, requestKey]).
func requestHash(bucket, requestKey string) Hash {
	return hashOf("[" + quoteJS(bucket) + "," + quoteJS(requestKey) + "]")
}

// fingerprintHash is the package's identity of a reservation:
// SHA-256 of JSON.stringify([bucket, tokens, ttlMs, fingerprint]).
func fingerprintHash(bucket string, tokens int64, ttl time.Duration, fingerprint string) Hash {
	return hashOf("[" + quoteJS(bucket) + "," + strconv.FormatInt(tokens, 10) + "," +
		strconv.FormatInt(ttl.Milliseconds(), 10) + "," + quoteJS(fingerprint) + "]")
}

func hashOf(s string) Hash { return sha256.Sum256([]byte(s)) }

// quoteJS writes a string as JSON.stringify does. encoding/json escapes more
// (<, >, &, U+2028, U+2029), which would give another hash.
func quoteJS(s string) string {
	const digits = "0123456789abcdef"
	var b strings.Builder
	b.Grow(len(s) + 2)
	b.WriteByte('"')
	for i := range len(s) {
		switch c := s[i]; c {
		case '"', '\\':
			b.WriteByte('\\')
			b.WriteByte(c)
		case '\b':
			b.WriteString(`\b`)
		case '\f':
			b.WriteString(`\f`)
		case '\n':
			b.WriteString(`\n`)
		case '\r':
			b.WriteString(`\r`)
		case '\t':
			b.WriteString(`\t`)
		default:
			if c < 0x20 {
				b.WriteString(`\u00`)
				b.WriteByte(digits[c>>4])
				b.WriteByte(digits[c&0xF])
			} else {
				b.WriteByte(c)
			}
		}
	}
	b.WriteByte('"')
	return b.String()
}
