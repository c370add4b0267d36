# `make` alone lists what there is. Tools are built from the module hack/tools,
# which pins them; nothing has to be installed by hand besides Go, make, git and a
# C compiler.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# TEST_TIMEOUT bounds one test package, TESTS and RUN select some of them:
#   make test TESTS=./internal/ledger/... RUN=TestReserve
TEST_TIMEOUT ?= 30m
TESTS ?= ./...
RUN ?= .
# FUZZ_TIME bounds each search for inputs that break something: 3000x is so many of them,
# 10m a time.
FUZZ_TIME ?= 3000x
# BENCH_FLAGS are those of hack/bench: make bench BENCH_FLAGS=-quick
BENCH_FLAGS ?=
# CONFORMANCE_FLAGS are those of hack/conformance: -seed repeats a run.
CONFORMANCE_FLAGS ?=

MODULES := . hack/bench hack/controlplane hack/tools
# hack/controlplane has no code of its own: it only names the programs that it pins.
LINTED := . hack/bench hack/tools
GENERATED := ':(glob)**/zz_generated.*.go' ':(glob)proto/**/*.go' config/crd/bases config/rbac/role.yaml

TOOLS := $(CURDIR)/bin/tools
CONTROLLER_GEN := $(TOOLS)/controller-gen
GOLANGCI_LINT := $(TOOLS)/golangci-lint
BUF := $(TOOLS)/buf
PROTOC_PLUGINS := $(TOOLS)/protoc-gen-go $(TOOLS)/protoc-gen-connect-go

##@ Everyday

.PHONY: help
help: ## List the targets.
	@awk 'BEGIN {FS = ":.*## "} /^##@ / {printf "\n%s\n", substr($$0, 5)} \
		/^[a-z-]+:.*## / {printf "  %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

.PHONY: build
build: ## Build the manager into bin/.
	go build -o bin/manager ./cmd/manager

.PHONY: demo
demo: ## Show a raise from beginning to end, from nothing, and clean up.
	go build -o bin/demo ./hack/demo
	exec bin/demo

.PHONY: dev
dev: ## Keep PostgreSQL and a control plane running until Ctrl-C, and say how to reach them.
	go build -o bin/devenv ./hack/devenv
	exec bin/devenv up

##@ Checks

.PHONY: test
test: assets ## Run all tests on a real PostgreSQL and a real API server.
	go -C hack/bench test -count=1 ./...
	go test -count=1 -timeout $(TEST_TIMEOUT) -run '$(RUN)' $(TESTS)
	if [[ '$(TESTS) $(RUN)' == './... .' ]]; then $(MAKE) --no-print-directory fuzz; fi

.PHONY: fuzz
fuzz: ## Look for inputs that break what decodes them; FUZZ_TIME=10m looks longer.
	go test -run '^$$' -fuzz '^FuzzNames$$' -fuzztime $(FUZZ_TIME) ./internal/ledger
	go test -run '^$$' -fuzz '^FuzzRequests$$' -fuzztime $(FUZZ_TIME) ./internal/dataplane
	go test -run '^$$' -fuzz '^FuzzTokens$$' -fuzztime $(FUZZ_TIME) ./internal/dataplane

.PHONY: conformance
conformance: ## Compare the ledger with the npm package that it follows; needs npm.
	go build -o bin/conformance ./hack/conformance
	exec bin/conformance $(CONFORMANCE_FLAGS)

.PHONY: bench
bench: ## Compare the ledger with its alternatives, on a PostgreSQL that writes to the disk.
	go -C hack/bench build -o $(CURDIR)/bin/bench .
	exec bin/bench $(BENCH_FLAGS)

.PHONY: bench-sweep
bench-sweep: ## Measure how late raises are restored that are due together.
	go test -timeout $(TEST_TIMEOUT) -run '^$$' -bench '$(RUN)' ./internal/sweeper/...

.PHONY: lint
lint: $(GOLANGCI_LINT) $(BUF) ## Run the linters.
	@for module in $(LINTED); do echo "golangci-lint: $$module"; \
		(cd $$module && $(GOLANGCI_LINT) run --config $(CURDIR)/.golangci.yml ./...); done
	$(GOLANGCI_LINT) run --config .golangci-api.yml ./api/...
	$(BUF) lint

.PHONY: verify
verify: verify-generated verify-modules verify-protocol lint ## Check generated files, modules and style.
	go vet ./...
	go vet -tags faultinjection ./...
	go -C hack/tools vet ./...
	go -C hack/bench vet ./...

##@ Upkeep

.PHONY: generate
generate: $(CONTROLLER_GEN) $(BUF) $(PROTOC_PLUGINS) ## Write deep copies, CRDs, the manager's role and the protocol's code.
	$(CONTROLLER_GEN) object paths=./api/...
	$(CONTROLLER_GEN) crd paths=./api/... output:crd:artifacts:config=config/crd/bases
	$(CONTROLLER_GEN) rbac:roleName=tokenlease-manager paths=./internal/controller/... paths=./cmd/manager/... output:rbac:artifacts:config=config/rbac
	$(BUF) generate

.PHONY: fmt
fmt: $(GOLANGCI_LINT) ## Format the Go files.
	$(GOLANGCI_LINT) fmt

.PHONY: tidy
tidy: ## Tidy every module.
	@for module in $(MODULES); do echo "go mod tidy: $$module"; go -C $$module mod tidy; done

.PHONY: clean
clean: ## Remove what was built; the development environment's programs stay.
	rm -rf bin

# The parts of test and verify.

.PHONY: assets
assets:
	go run ./hack/devenv assets

.PHONY: verify-generated
verify-generated: generate
	@git diff --exit-code -- $(GENERATED) || \
		{ echo 'Generated files differ from the sources: add what `make generate` wrote.' >&2; exit 1; }
	@untracked=$$(git ls-files --others --exclude-standard -- $(GENERATED)); \
		[ -z "$$untracked" ] || { echo "Generated files are not in git: $$untracked" >&2; exit 1; }

.PHONY: verify-modules
verify-modules:
	@for module in $(MODULES); do echo "go mod tidy -diff: $$module"; go -C $$module mod tidy -diff; done

# The protocol is compared with what is committed, and with what was so before the
# last commit that changed it, since after a commit the first is no comparison.
.PHONY: verify-protocol
verify-protocol: $(BUF)
	@for commit in HEAD $$(git log --max-count=2 --format=%H -- proto buf.yaml | sed -n 2p); do \
		git cat-file -e $$commit:proto 2>/dev/null || continue; \
		before=$$(mktemp -d); \
		git archive $$commit proto buf.yaml | tar -x -C $$before; \
		echo "buf breaking against $$commit"; \
		$(BUF) breaking --against $$before || { rm -rf $$before; exit 1; }; \
		rm -rf $$before; \
	done

$(BUF): hack/tools/go.mod hack/tools/go.sum
	go -C hack/tools build -o $@ github.com/bufbuild/buf/cmd/buf

$(TOOLS)/protoc-gen-go: hack/tools/go.mod hack/tools/go.sum
	go -C hack/tools build -o $@ google.golang.org/protobuf/cmd/protoc-gen-go

$(TOOLS)/protoc-gen-connect-go: hack/tools/go.mod hack/tools/go.sum
	go -C hack/tools build -o $@ connectrpc.com/connect/cmd/protoc-gen-connect-go

$(CONTROLLER_GEN): hack/tools/go.mod hack/tools/go.sum
	go -C hack/tools build -o $@ sigs.k8s.io/controller-tools/cmd/controller-gen

$(GOLANGCI_LINT): hack/tools/go.mod hack/tools/go.sum hack/tools/golangci-lint/main.go
	@echo 'Building golangci-lint, once; this takes some minutes.'
	go -C hack/tools build -o $@ ./golangci-lint
