package client

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"
)

const (
	// keepToken is how long a token that was read is used; the kubelet renews a file
	// long before the token in it ends.
	keepToken     = 10 * time.Second
	maxTokenBytes = 16 << 10
)

// tokenFile is a token that somebody else renews.
type tokenFile struct {
	path string

	mutex  sync.Mutex
	token  string
	readAt time.Time
}

// get returns the token; fresh reads the file in any case.
func (f *tokenFile) get(fresh bool) (string, error) {
	f.mutex.Lock()
	defer f.mutex.Unlock()
	if !fresh && f.token != "" && time.Since(f.readAt) < keepToken {
		return f.token, nil
	}
	token, err := readToken(f.path)
	if err != nil {
		if f.token != "" && !fresh {
			return f.token, nil // it may be good yet, and the server says so if not
		}
		return "", err
	}
	f.token, f.readAt = token, time.Now()
	return token, nil
}

func readToken(path string) (string, error) {
	file, err := os.Open(path) //nolint:gosec // whoever makes the client names its token
	if err != nil {
		return "", fmt.Errorf("read the token: %w", err)
	}
	defer file.Close()
	text, err := io.ReadAll(io.LimitReader(file, maxTokenBytes+1))
	if err != nil {
		return "", fmt.Errorf("read the token: %w", err)
	}
	token := strings.TrimSpace(string(text))
	if token == "" || len(text) > maxTokenBytes {
		return "", errors.New("read the token: " + path + " does not hold one")
	}
	return token, nil
}
