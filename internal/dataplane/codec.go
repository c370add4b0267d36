package dataplane

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
)

// strictJSON is the JSON of this service: what is not known is refused, what is 0 is
// written.
type strictJSON struct{ name string }

var (
	_     connect.Codec = strictJSON{}
	write               = protojson.MarshalOptions{EmitDefaultValues: true}
)

// jsonCodecs are the codec under both names that Connect has for it.
func jsonCodecs() connect.HandlerOption {
	return connect.WithHandlerOptions(
		connect.WithCodec(strictJSON{name: "json"}),
		connect.WithCodec(strictJSON{name: "json; charset=utf-8"}),
	)
}

// Name implements connect.Codec.
func (c strictJSON) Name() string { return c.name }

// Marshal implements connect.Codec.
func (c strictJSON) Marshal(message any) ([]byte, error) {
	m, ok := message.(proto.Message)
	if !ok {
		return nil, fmt.Errorf("%T is no message", message)
	}
	text, err := write.Marshal(m)
	if err != nil {
		return nil, err
	}
	// protojson scatters blanks on purpose; scripts that look into an answer have it alike
	// each time.
	compact := bytes.NewBuffer(make([]byte, 0, len(text)))
	if err := json.Compact(compact, text); err != nil {
		return nil, err
	}
	return compact.Bytes(), nil
}

// Unmarshal implements connect.Codec.
func (c strictJSON) Unmarshal(text []byte, message any) error {
	m, ok := message.(proto.Message)
	if !ok {
		return fmt.Errorf("%T is no message", message)
	}
	if len(text) == 0 {
		return errors.New("the body is empty; it must be a JSON object")
	}
	return protojson.UnmarshalOptions{RecursionLimit: maxNesting}.Unmarshal(text, m)
}

// maxNesting bounds how deep a request may be nested; the deepest one has three levels.
const maxNesting = 16
