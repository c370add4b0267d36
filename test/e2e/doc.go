// Package e2e holds the end-to-end tests: the manager as it is built for users,
// as a process of its own, under the role that is shipped, against a real API
// server and a real PostgreSQL. The tests look at what users see (objects,
// kubectl, events, metrics) and at what auditors see (SQL), never inside.
//
// Each test has an installation of its own: a namespace, a database with a
// run-time role, a cluster ID and a leader election. They wait for states and
// never for durations, so most of them run side by side; those that take an API
// server down have one of their own.
package e2e
