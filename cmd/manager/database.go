package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"strings"
)

// databaseURLEnvironment is read when no file is named.
const databaseURLEnvironment = "DATABASE_URL"

// maxDatabaseURLBytes bounds what is read from the file.
const maxDatabaseURLBytes = 16 << 10

// database says where the connection string of the ledger comes from.
type database struct{ file string }

func (d *database) bind(fs *flag.FlagSet) {
	fs.StringVar(&d.file, "database-url-file", "",
		"File with the PostgreSQL connection URL of the ledger. It is read again for each new connection, so a rotated password needs no restart. Without it, the environment variable "+databaseURLEnvironment+" is taken.")
}

// connString returns the URL as it is now. Errors name the source, never the
// content.
func (d *database) connString(context.Context) (string, error) {
	if d.file == "" {
		if url := strings.TrimSpace(os.Getenv(databaseURLEnvironment)); url != "" {
			return url, nil
		}
		return "", fmt.Errorf("no database: set --database-url-file or the environment variable %s", databaseURLEnvironment)
	}
	content, err := os.ReadFile(d.file)
	if err != nil {
		return "", fmt.Errorf("read the database URL: %w", err)
	}
	if len(content) > maxDatabaseURLBytes {
		return "", fmt.Errorf("%s is too large for a database URL (at most %d bytes)", d.file, maxDatabaseURLBytes)
	}
	url := strings.TrimSpace(string(content))
	if url == "" {
		return "", errors.New(d.file + " is empty; it must hold the PostgreSQL connection URL")
	}
	return url, nil
}
