package main

import (
	"os/exec"
	"testing"
)

// Goal: what is printed for a shell means the same text to it.
func TestShellQuote(t *testing.T) {
	for _, text := range []string{"", "plain", "with space", `it's $HOME "quoted" \n`} {
		out, err := exec.CommandContext(t.Context(), "/bin/sh", "-c", "printf %s "+shellQuote(text)).Output()
		if err != nil || string(out) != text {
			t.Errorf("the shell reads %q, %v, want %q", out, err, text)
		}
	}
}

// Goal: anything but one known command gets the usage.
func TestCommand(t *testing.T) {
	for _, test := range []struct {
		args []string
		want string
	}{
		{nil, ""}, {[]string{"up", "now"}, ""}, {[]string{"up"}, "up"}, {[]string{"--help"}, "help"},
	} {
		if got := command(test.args); got != test.want {
			t.Errorf("command(%q) is %q, want %q", test.args, got, test.want)
		}
	}
}
