package importer

import (
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/token-lease/operator/internal/ledger"
)

// document is a bucket as the package keeps it. Figures are tokens, instants
// milliseconds of the Unix epoch.
type document struct {
	bucket                string
	limit, used, reserved int64
	revision              int64
	createdAt, updatedAt  int64
	leases                []documentLease
}

type documentLease struct {
	id                           string
	requestHash, fingerprintHash []byte
	state                        ledger.LeaseState
	reserved                     int64
	actual                       *int64
	createdAt, expiresAt         int64
	settledAt                    *int64
}

// schemaVersion is the only one that the package has had.
const schemaVersion = 1

var (
	wholePattern = regexp.MustCompile(`^(0|[1-9][0-9]*)$`)
	hashPattern  = regexp.MustCompile(`^[0-9a-f]{64}$`)
	idPattern    = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$`)
)

// fields reads the fields of a JSON object and remembers the first that is not what
// it should be.
type fields struct {
	name   string
	values map[string]json.RawMessage
	err    error
}

func fieldsOf(name string, text json.RawMessage) *fields {
	f := &fields{name: name}
	if err := json.Unmarshal(text, &f.values); err != nil || f.values == nil {
		f.err = fmt.Errorf("%s is not an object", name)
	}
	return f
}

func (f *fields) fail(field, format string, args ...any) {
	if f.err == nil {
		f.err = fmt.Errorf("%s.%s %s", f.name, field, fmt.Sprintf(format, args...))
	}
}

// count is a whole number from 0 to MaxTokens, written without a sign, a fraction or
// an exponent.
func (f *fields) count(field string) int64 {
	text := string(f.values[field])
	n, err := strconv.ParseInt(text, 10, 64)
	if !wholePattern.MatchString(text) || err != nil || n > ledger.MaxTokens {
		f.fail(field, "is not a whole number from 0 to %d", ledger.MaxTokens)
		return 0
	}
	return n
}

func (f *fields) optionalCount(field string) *int64 {
	if string(f.values[field]) == "null" {
		return nil
	}
	n := f.count(field)
	return &n
}

func (f *fields) text(field string) string {
	var text *string
	if err := json.Unmarshal(f.values[field], &text); err != nil || text == nil {
		f.fail(field, "is not a string")
		return ""
	}
	return *text
}

func (f *fields) hash(field string) []byte {
	text := f.text(field)
	hash, err := hex.DecodeString(text)
	if err != nil || !hashPattern.MatchString(text) {
		f.fail(field, "is not a SHA-256 in lower-case hex")
	}
	return hash
}

func (f *fields) object(field string) map[string]json.RawMessage {
	inner := fieldsOf(f.name+"."+field, f.values[field])
	if f.err == nil {
		f.err = inner.err
	}
	return inner.values
}

// decode reads a row of the package's table. What the package itself would call
// corrupt is refused, with what is wrong.
func decode(key string, revision int64, state string) (*document, error) {
	if err := checkNumbers(state); err != nil {
		return nil, err
	}
	f := fieldsOf("state", json.RawMessage(state))
	if f.err != nil {
		return nil, f.err
	}
	d := &document{
		bucket: f.text("bucket"), limit: f.count("limit"), used: f.count("usedTokens"), reserved: f.count("reservedTokens"),
		revision: f.count("revision"), createdAt: f.count("createdAt"), updatedAt: f.count("updatedAt"),
	}
	version := f.count("schemaVersion")
	leases, requests := f.object("leases"), f.object("requests")
	switch {
	case f.err != nil:
		return nil, f.err
	case version != schemaVersion:
		return nil, fmt.Errorf("state.schemaVersion is %d, and only %d is known", version, schemaVersion)
	case d.bucket != key:
		return nil, fmt.Errorf("state.bucket is %q, and the row's key is another", d.bucket)
	case d.revision != revision || revision < 1:
		return nil, fmt.Errorf("state.revision is %d, and the row's revision is %d", d.revision, revision)
	case d.updatedAt < d.createdAt:
		return nil, errors.New("state.updatedAt is before state.createdAt")
	case len(leases) != len(requests):
		return nil, fmt.Errorf("there are %d leases and %d requests", len(leases), len(requests))
	}
	for id, text := range leases {
		lease, err := d.decodeLease(id, text, requests)
		if err != nil {
			return nil, err
		}
		d.leases = append(d.leases, lease)
	}
	return d, d.checkSums()
}

// checkNumbers refuses what the package refuses wherever it stands: a number that a
// JavaScript client would not read exactly.
func checkNumbers(state string) error {
	decoder := json.NewDecoder(strings.NewReader(state))
	decoder.UseNumber()
	for {
		token, err := decoder.Token()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("it is no JSON: %w", err)
		}
		number, ok := token.(json.Number)
		if !ok {
			continue
		}
		if n, err := number.Int64(); err != nil || n > ledger.MaxTokens || !wholePattern.MatchString(number.String()) {
			return fmt.Errorf("the number %s is not a whole one from 0 to %d", number, ledger.MaxTokens)
		}
	}
}

func (d *document) decodeLease(id string, text json.RawMessage, requests map[string]json.RawMessage) (documentLease, error) {
	f := fieldsOf("lease "+strconv.Quote(id), text)
	if f.err != nil {
		return documentLease{}, f.err
	}
	l := documentLease{
		id: f.text("id"), requestHash: f.hash("requestHash"), fingerprintHash: f.hash("fingerprintHash"),
		state: ledger.LeaseState(f.text("state")), reserved: f.count("reservedTokens"), actual: f.optionalCount("actualTokens"),
		createdAt: f.count("createdAt"), expiresAt: f.count("expiresAt"), settledAt: f.optionalCount("settledAt"),
	}
	switch {
	case f.err != nil:
	case l.id != id || !idPattern.MatchString(id):
		f.fail("id", "is %q, and a lease ID has letters, numbers, dots, underscores, colons and hyphens", l.id)
	case l.reserved == 0:
		f.fail("reservedTokens", "is 0")
	case l.createdAt < d.createdAt || l.createdAt > d.updatedAt:
		f.fail("createdAt", "is outside the bucket's time")
	case l.expiresAt <= l.createdAt:
		f.fail("expiresAt", "is not after createdAt")
	default:
		d.checkSettlement(f, l)
		checkRequest(f, l, requests)
	}
	return l, f.err
}

// checkSettlement holds the state of a lease against its other fields.
func (d *document) checkSettlement(f *fields, l documentLease) {
	switch l.state {
	case ledger.LeaseReserved:
		if l.actual != nil || l.settledAt != nil {
			f.fail("state", "is reserved, and the lease has been settled")
		} else if l.expiresAt <= d.updatedAt {
			f.fail("state", "is reserved, and the lease expired before the bucket's last update")
		}
		return
	case ledger.LeaseCommitted, ledger.LeaseReleased, ledger.LeaseExpired:
	default:
		f.fail("state", "is %q", l.state)
		return
	}
	switch {
	case l.settledAt == nil || *l.settledAt < l.createdAt || *l.settledAt > d.updatedAt:
		f.fail("settledAt", "is not between createdAt and the bucket's last update")
	case (l.state == ledger.LeaseCommitted) != (l.actual != nil):
		f.fail("actualTokens", "does not fit the state %s", l.state)
	case (l.state == ledger.LeaseExpired) != (*l.settledAt >= l.expiresAt):
		f.fail("settledAt", "does not fit the state %s", l.state)
	}
}

func checkRequest(f *fields, l documentLease, requests map[string]json.RawMessage) {
	if f.err != nil {
		return
	}
	hash := hex.EncodeToString(l.requestHash)
	request := fieldsOf("request "+hash, requests[hash])
	if request.err != nil || request.text("leaseId") != l.id ||
		request.text("fingerprintHash") != hex.EncodeToString(l.fingerprintHash) {
		f.fail("requestHash", "has no entry in the requests that fits")
	}
}

// checkSums holds the counters against the leases.
func (d *document) checkSums() error {
	var used, reserved int64
	for _, l := range d.leases {
		switch l.state {
		case ledger.LeaseReserved:
			reserved += l.reserved
		case ledger.LeaseCommitted:
			used += *l.actual
		case ledger.LeaseReleased, ledger.LeaseExpired:
		}
		if used > ledger.MaxTokens || reserved > ledger.MaxTokens {
			return errors.New("the leases sum up to more than can be counted")
		}
	}
	switch {
	case used != d.used || reserved != d.reserved:
		return fmt.Errorf("usedTokens and reservedTokens are %d and %d, and the leases sum up to %d and %d", d.used, d.reserved, used, reserved)
	case used+reserved > d.limit:
		return fmt.Errorf("%d tokens are used and reserved, above the limit of %d", used+reserved, d.limit)
	}
	return nil
}

// checkTarget refuses what is right for the package and cannot be kept here.
func (d *document) checkTarget(clock time.Time) error {
	if err := ledger.ValidateBucketKey(d.bucket); err != nil {
		return err
	}
	if d.updatedAt > clock.UnixMilli() {
		return fmt.Errorf("it was last updated at %s, which is in the future by the ledger's clock; wait until then, or mend the clock of the machine that wrote it",
			instantOf(d.updatedAt).Format(time.RFC3339))
	}
	for _, l := range d.leases {
		if ledger.IsOwnLeaseID(l.id) {
			return fmt.Errorf("the lease ID %q has the form of this ledger's own", l.id)
		}
		if instantOf(l.expiresAt).Year() > latestYear {
			return fmt.Errorf("the lease %q expires after the year %d", l.id, latestYear)
		}
	}
	return nil
}

const latestYear = 9999

func instantOf(milliseconds int64) time.Time { return time.UnixMilli(milliseconds).UTC() }
