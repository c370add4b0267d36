// Package fault has named points at which tests stop or kill the process, to show
// that it may end anywhere.
//
// In an ordinary build Point does nothing. With the build tag "faultinjection" it
// obeys the environment:
//
//	TOKENLEASE_FAULT            name=kill or name=pause, with an optional count:
//	                            name=kill:2 acts the second time the point is reached
//	TOKENLEASE_FAULT_ONCE_FILE  a file that is created before acting; while it
//	                            exists nothing acts, so that a restarted process
//	                            goes on
//
// kill sends SIGKILL to the own process, pause sends SIGSTOP.
package fault
