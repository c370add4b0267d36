package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strconv"

	"sigs.k8s.io/yaml"
)

const (
	configFlag = "config"
	// maxConfigBytes bounds what is read from the file.
	maxConfigBytes = 64 << 10
)

// readConfig sets the flags that a file names and the command line does not. What a
// file may say is what the flags are: nothing is listed twice.
func readConfig(fs *flag.FlagSet, file string) error {
	if file == "" {
		return nil
	}
	values, err := decodeConfig(file)
	if err != nil {
		return fmt.Errorf("--%s: %w", configFlag, err)
	}
	given := map[string]bool{}
	fs.Visit(func(f *flag.Flag) { given[f.Name] = true })
	var wrong []error
	for _, name := range slices.Sorted(maps.Keys(values)) {
		if err := setFlag(fs, name, values[name], given[name]); err != nil {
			wrong = append(wrong, fmt.Errorf("%s: %w", file, err))
		}
	}
	return errors.Join(wrong...)
}

func decodeConfig(file string) (map[string]any, error) {
	f, err := os.Open(file) //nolint:gosec // the name comes from our own flag
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	content, err := io.ReadAll(io.LimitReader(f, maxConfigBytes+1))
	if err != nil {
		return nil, err
	}
	if len(content) > maxConfigBytes {
		return nil, fmt.Errorf("%s is too large for a configuration (at most %d bytes)", file, maxConfigBytes)
	}
	text, err := yaml.YAMLToJSONStrict(content)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	values := map[string]any{}
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.UseNumber() // a float would write a large number in another way
	if err := decoder.Decode(&values); err != nil {
		return nil, fmt.Errorf("%s must hold one value for each name: %w", file, err)
	}
	return values, nil
}

// setFlag checks a value also where the command line has another one, so that a file
// is right or wrong by itself.
func setFlag(fs *flag.FlagSet, name string, value any, given bool) error {
	known := fs.Lookup(name)
	if known == nil || name == configFlag {
		return fmt.Errorf("%q is no flag that can stand here", name)
	}
	var text string
	switch v := value.(type) {
	case string:
		text = v
	case bool:
		text = strconv.FormatBool(v)
	case json.Number:
		text = v.String()
	default:
		return fmt.Errorf("%s must be a text, a number or a boolean", name)
	}
	before := known.Value.String()
	if err := fs.Set(name, text); err != nil {
		return fmt.Errorf("%s cannot be %q: %w", name, text, err)
	}
	if given {
		return fs.Set(name, before)
	}
	return nil
}
