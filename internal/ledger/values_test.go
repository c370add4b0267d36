package ledger

import (
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"
	"unicode/utf16"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"
)

// Goal: hashes are the package's, so that request keys stay valid when a bucket
// moves over. Method: digests made by Node.js with the package's own expression,
// createHash("sha256").update(JSON.stringify([...])).
func TestHashesAreThePackages(t *testing.T) {
	for _, test := range []struct{ bucket, key, want string }{
		{"tenant-42", "job-8ac1", "647b4f4672120bcb3dce0e629f2a8439e55e8d9e009522b9d1e02bad658f710b"},
		{`a"b\c`, "k/<&>", "48bd7a4c3f11d85c3863a89ec11dc0d0dc158ce6a72176b27a21dcd2fc38c69f"},
		{"ключ", "emoji \U0001F600", "8f01d35f6b94bda5e12d8b68a1795e34143082c0433df4a71819f6a27daefc72"},
		{"x", "line\u2028sep\u2029end", "5b56c2c965bf32c63ff1aa2c768cf216de18417e215a240ceab9416845b2621c"},
		{"é", "\u007f~", "d483bc8ce503c265d5b3f8fb3e9c23ba5317bbb7ec6ddf09d59e57542fbf939e"},
	} {
		if got := requestHash(test.bucket, test.key); got.String() != test.want {
			t.Errorf("request hash of %q, %q: %s", test.bucket, test.key, got)
		}
	}
	for _, test := range []struct {
		bucket      string
		tokens      int64
		ttl         time.Duration
		fingerprint string
		want        string
	}{
		{"tenant-42", 4000, 30 * time.Second, "summarize:doc", "0566c2fef0b0b813b17e8294c096c0317a88a1d24aae55cb59e90484b88fce98"},
		{"t", 1, time.Minute, "tab\there\nnl \x00 \x1f \b\f\r \"q\" \\ \u2028 \U0001F600 <&>",
			"1d40fe6ab0d61ed5a6ef7451ca5e144d1435444bee272d98d2bb11c0c9649a7f"},
		{"t", MaxTokens, time.Millisecond, "x", "b554eac79c83a279bbb8584720fd420fccb091825972102a7341fb6a8fe28648"},
	} {
		if got := fingerprintHash(test.bucket, test.tokens, test.ttl, test.fingerprint); got.String() != test.want {
			t.Errorf("fingerprint hash of %q: %s", test.fingerprint, got)
		}
	}
}

// Goal: white space is JavaScript's. Method: every code point of the basic plane,
// against the list that Node.js gives for String.prototype.trim.
func TestTrimIsJavaScripts(t *testing.T) {
	space := map[rune]bool{}
	for _, r := range []rune{9, 0xa, 0xb, 0xc, 0xd, 0x20, 0xa0, 0x1680, 0x2028, 0x2029, 0x202f, 0x205f, 0x3000, 0xfeff} {
		space[r] = true
	}
	for r := rune(0x2000); r <= 0x200a; r++ {
		space[r] = true
	}
	for r := range rune(0x10000) {
		if r >= 0xD800 && r <= 0xDFFF {
			continue
		}
		if got := trimJS(string(r)+"a") == "a"; got != space[r] {
			t.Errorf("U+%04X: trimmed %v", r, got)
		}
	}
}

// Goal: keys that the store could not hold, or that look like another key, are
// refused with a reason.
func TestBucketKeys(t *testing.T) {
	for _, test := range []struct {
		name, key string
		valid     bool
	}{
		{"plain", "tenants/pm-4821", true},
		{"longest", strings.Repeat("k", 200), true},
		{"too long", strings.Repeat("k", 201), false},
		{"longest in UTF-16 units", strings.Repeat("\U0001F600", 100), true},
		{"too long in UTF-16 units", strings.Repeat("\U0001F600", 100) + "k", false},
		{"empty", "", false},
		{"NUL", "a\x00b", false},
		{"delete", "a\x7fb", false},
		{"not UTF-8", "a\xffb", false},
		{"trailing space", "a ", false},
		{"leading no-break space", "\u00a0a", false},
		{"byte order mark", "\ufeffa", false},
		{"next line is no white space in JavaScript", "\u0085a", true},
		{"composed", "caf\u00e9", true},
		{"decomposed", "cafe\u0301", false},
		{"case is kept", "CAFE", true},
	} {
		t.Run(test.name, func(t *testing.T) {
			err := ValidateBucketKey(test.key)
			if (err == nil) != test.valid {
				t.Errorf("got %v", err)
			}
			if err != nil && CodeOf(err) != CodeInvalidInput {
				t.Errorf("code %s", CodeOf(err))
			}
		})
	}
}

// Goal: no figure outside 0..2^53-1 gets in.
func TestCounters(t *testing.T) {
	for value, valid := range map[int64]bool{
		0: true, 1: true, MaxTokens: true, MaxTokens + 1: false, -1: false, 1<<63 - 1: false, -1 << 63: false,
	} {
		t.Run(fmt.Sprint(value), func(t *testing.T) {
			if err := counter("tokens", value); (err == nil) != valid {
				t.Errorf("got %v", err)
			}
		})
	}
}

// Goal: instants are cut off and never rounded up, in every zone.
func TestTruncate(t *testing.T) {
	at := time.Date(2026, 11, 30, 18, 0, 0, 999_999_900, time.FixedZone("", 9*3600))
	if got := Truncate(at); !got.Equal(time.Date(2026, 11, 30, 9, 0, 0, 999_000_000, time.UTC)) || got.Location() != time.UTC {
		t.Errorf("got %s", got)
	}
}

// FuzzNames holds the checks of names to what they are said to be.
//
// Goal: a key is taken only if it is trimmed, in normal form, free of control characters
// and within its length, and everything of that kind is; a lease ID follows its pattern.
func FuzzNames(f *testing.F) {
	pattern := regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}\z`)
	for _, name := range []string{
		"", "a", "tenants/pm-4821", " a", "a ", "a b", "a\u00a0", "\ufeffa", "e\u0301", "\u00e9", "\x00", "a\x7f", "a\u0085", "\xff",
		strings.Repeat("k", 200), strings.Repeat("k", 201), strings.Repeat("\U0001F600", 100), strings.Repeat("\U0001F600", 101),
		"mfyz0001." + strings.Repeat("A", 43), ".a", "a.b:c_d-e", strings.Repeat("i", 128), strings.Repeat("i", 129), "a\n",
	} {
		f.Add(name)
	}
	f.Fuzz(func(t *testing.T, name string) {
		units := len(utf16.Encode([]rune(name)))
		good := utf8.ValidString(name) && units >= 1 && units <= 200 && trimJS(name) == name && norm.NFC.IsNormalString(name) &&
			!strings.ContainsFunc(name, func(r rune) bool { return r < 0x20 || r == 0x7f })
		if err := ValidateBucketKey(name); (err == nil) != good {
			t.Errorf("the key %q: %v, want it taken: %v", name, err, good)
		}
		if err := validateLeaseID(name); (err == nil) != pattern.MatchString(name) {
			t.Errorf("the lease ID %q: %v", name, err)
		}
	})
}
