package postgres

import (
	"bytes"
	"context"
	"net"
	"net/url"
	"sync"
	"testing"
)

// verdict says what the proxy does with a piece of the stream.
type verdict int

const (
	forward verdict = iota
	// sever closes the connection.
	sever
	// swallow keeps the piece, and the connection open.
	swallow
)

// proxy stands between a store and its server, so that tests can break the
// connection at a chosen message.
type proxy struct {
	url string

	mutex sync.Mutex
	// fromClient and fromServer judge each piece before it is passed on; nil
	// forwards it.
	fromClient, fromServer func(piece []byte) verdict
	// shut severs every connection, and every new one.
	shut bool
}

// newProxy listens in front of the database's server.
func newProxy(d *database) *proxy {
	d.t.Helper()
	target, err := url.Parse(d.url)
	if err != nil {
		d.t.Fatal(err)
	}
	listener, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp", "127.0.0.1:0")
	if err != nil {
		d.t.Fatal(err)
	}
	d.t.Cleanup(func() { listener.Close() })
	address := target.Host
	target.Host = listener.Addr().String()
	p := &proxy{url: target.String()}
	go func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			if p.isShut() {
				client.Close()
				continue
			}
			server, err := (&net.Dialer{}).DialContext(context.Background(), "tcp", address)
			if err != nil {
				client.Close()
				continue
			}
			go p.pipe(client, server, func() func([]byte) verdict { return p.fromClient })
			go p.pipe(server, client, func() func([]byte) verdict { return p.fromServer })
		}
	}()
	return p
}

func (p *proxy) pipe(from, to net.Conn, judge func() func([]byte) verdict) {
	defer from.Close()
	defer to.Close()
	buffer := make([]byte, 64<<10)
	for {
		n, err := from.Read(buffer)
		if err != nil {
			return
		}
		p.mutex.Lock()
		hook, v := judge(), forward
		if hook != nil {
			v = hook(buffer[:n])
		}
		if p.shut {
			v = sever
		}
		p.mutex.Unlock()
		if v == sever {
			return
		}
		if v == forward {
			if _, err := to.Write(buffer[:n]); err != nil {
				return
			}
		}
	}
}

// hook installs judges, and lets connections through again.
func (p *proxy) hook(fromClient, fromServer func([]byte) verdict) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	p.fromClient, p.fromServer, p.shut = fromClient, fromServer, false
}

func (p *proxy) isShut() bool {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	return p.shut
}

// COMMIT as the client sends it, and as the server answers it.
var (
	commitSent     = []byte("COMMIT\x00")
	commitAnswered = []byte("COMMIT\x00")
)

// loss is a way in which a client is left without the answer to its COMMIT.
type loss struct {
	name string
	// arrives says that the transaction stands: the server has had the COMMIT.
	arrives bool
	verdict verdict
	// forGood lets nobody through from then on.
	forGood bool
}

var (
	answerCut       = loss{name: "the answer is cut off", arrives: true, verdict: sever}
	answerSwallowed = loss{name: "the answer never comes", arrives: true, verdict: swallow}
	requestCut      = loss{name: "COMMIT never arrives", verdict: sever}
	serverGone      = loss{name: "the server is gone, with the answer", arrives: true, verdict: sever, forGood: true}
	serverGoneFirst = loss{name: "the server is gone, before COMMIT arrives", verdict: sever, forGood: true}
)

// loseCommits lets the first n COMMITs be lost, and counts those that were.
func (p *proxy) loseCommits(n int, how loss) (lost func() int) {
	count := 0
	judge := func(marker []byte) func([]byte) verdict {
		return func(piece []byte) verdict {
			if count == n || !bytes.Contains(piece, marker) {
				return forward
			}
			count++
			p.shut = p.shut || how.forGood
			return how.verdict
		}
	}
	if how.arrives {
		p.hook(nil, judge(commitAnswered))
	} else {
		p.hook(judge(commitSent), nil)
	}
	return func() int {
		p.mutex.Lock()
		defer p.mutex.Unlock()
		return count
	}
}

// countStatements counts the statements that clients have executed from now on.
func (p *proxy) countStatements(t *testing.T) func() int {
	t.Helper()
	var count int
	p.hook(func(piece []byte) verdict {
		// An Execute message for the unnamed portal, without a row limit.
		count += bytes.Count(piece, []byte{'E', 0, 0, 0, 9, 0, 0, 0, 0, 0})
		return forward
	}, nil)
	return func() int {
		p.mutex.Lock()
		defer p.mutex.Unlock()
		return count
	}
}
