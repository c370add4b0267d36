//go:build tools

// Package controlplane pins the programs of the development control plane. It
// is a module of its own so that the operator's go.mod does not carry the
// dependencies of Kubernetes itself.
package controlplane

import (
	_ "go.etcd.io/etcd/server/v3"
	_ "k8s.io/kubernetes/cmd/kube-apiserver"
	_ "k8s.io/kubernetes/cmd/kube-controller-manager"
	_ "k8s.io/kubernetes/cmd/kubectl"
)
