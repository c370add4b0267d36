#!/usr/bin/env bash
# Removes the operator from the current cluster; CRDs and objects stay. Each wait is
# bounded, and where something would hang, nothing has been removed yet.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

kubectl=${KUBECTL:-kubectl}
timeout=${TIMEOUT:-2m}
system=tokenlease-system
group=budget.tokenlease.dev
being_deleted='{{range .items}}{{if .metadata.deletionTimestamp}}{{.metadata.namespace}}/{{.metadata.name}} {{end}}{{end}}'

for kind in temporarylimitleases tokenbuckets; do
	crd=$($kubectl get crd "$kind.$group" --ignore-not-found --output=name)
	[ -n "$crd" ] || continue

	# The operator's namespace goes, and would take them along; their finalizers wait
	# for an operator that is gone by then.
	inside=$($kubectl get "$kind.$group" --namespace="$system" --output=name)
	if [ -n "$inside" ]; then
		echo "undeploy: nothing was removed, since these are in the namespace $system, which would go:" $inside >&2
		exit 1
	fi

	# What is being deleted waits for the manager as well.
	for object in $($kubectl get "$kind.$group" --all-namespaces --output=go-template="$being_deleted"); do
		echo "undeploy: waiting for $kind $object, which is being deleted"
		if ! $kubectl wait --for=delete --timeout="$timeout" --namespace="${object%/*}" "$kind.$group/${object#*/}"; then
			echo "undeploy: nothing was removed, since $kind $object would wait for good; does the manager run?" >&2
			exit 1
		fi
	done
done

$kubectl delete --ignore-not-found --timeout="$timeout" -k config/default
