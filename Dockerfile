# One static program and the public certificate authorities, for a database with
# verified TLS: no shell, no package manager, no C library.
#
#   docker build --tag REGISTRY/token-lease-operator:VERSION .
#
# GO_IMAGE is the image of the Go version in go.mod, from wherever you keep it.
ARG GO_IMAGE=golang:1.26.8
FROM ${GO_IMAGE} AS build
WORKDIR /src
# Modules first, so that a change of the source does not fetch them again.
COPY go.mod go.sum ./
RUN go mod download
COPY Makefile ./
COPY api api
COPY cmd cmd
COPY config config
COPY internal internal
COPY proto proto
RUN make build-static

FROM scratch
COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/
COPY --from=build /src/bin/manager-static /manager
USER 65532:65532
ENTRYPOINT ["/manager"]
