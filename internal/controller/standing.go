package controller

import (
	"sync"

	"sigs.k8s.io/controller-runtime/pkg/client"
)

// perObject remembers something about objects, at most one thing for each.
//
// Both controllers remember what they did in the ledger for an object, because a
// stored finalizer is no promise: an API server that has looked at an object
// without finalizers and is about to remove it does so although one is stored
// meanwhile. When an object turns out to be gone, what stands for it is ended as
// by its deletion. After a crash in between, the search for orphans does it.
type perObject[T any] struct {
	mutex sync.Mutex
	of    map[client.ObjectKey]T
}

func newPerObject[T any]() *perObject[T] { return &perObject[T]{of: map[client.ObjectKey]T{}} }

func (p *perObject[T]) load(key client.ObjectKey) (T, bool) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	value, known := p.of[key]
	return value, known
}

// take is load and forget.
func (p *perObject[T]) take(key client.ObjectKey) (T, bool) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	value, known := p.of[key]
	delete(p.of, key)
	return value, known
}

func (p *perObject[T]) store(key client.ObjectKey, value T) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	p.of[key] = value
}

func (p *perObject[T]) forget(key client.ObjectKey) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	delete(p.of, key)
}
