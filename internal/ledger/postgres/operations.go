package postgres

import (
	"bytes"
	"encoding/json"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/token-lease/operator/internal/ledger"
)

const operationColumns = `
	o.bucket_key, o.operation_id, o.inputs, o.code, o.message, o.details, o.recorded_at`

const neededOperations = `
SELECT` + operationColumns + `
FROM unnest($1::text[], $2::text[]) AS needed (bucket_key, operation_id)
JOIN tokenlease.operations AS o
	ON o.bucket_key = needed.bucket_key AND o.operation_id = needed.operation_id`

const insertOperations = `
INSERT INTO tokenlease.operations (bucket_key, operation_id, inputs, code, message, details, recorded_at)
SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::jsonb[], $7::timestamptz[])`

// deleteOperations removes what a bucket leaves behind, as deleteLeases does.
const deleteOperations = `DELETE FROM tokenlease.operations WHERE bucket_key = ANY ($1::text[])`

func scanOperation(row pgx.Row) (ledger.OperationRecord, error) {
	var o ledger.OperationRecord
	var details string
	err := row.Scan(&o.BucketKey, &o.ID, &o.Inputs, into(&o.Code), into(&o.Message), into(&details), instant{&o.At})
	if err != nil || details == "" {
		return o, err
	}
	o.Details, err = decodeDetails(details)
	return o, err
}

// decodeDetails keeps whole numbers whole: JSON alone would make them float64.
func decodeDetails(text string) (map[string]any, error) {
	decoder := json.NewDecoder(bytes.NewReader([]byte(text)))
	decoder.UseNumber()
	var details map[string]any
	if err := decoder.Decode(&details); err != nil {
		return nil, err
	}
	for name, value := range details {
		number, ok := value.(json.Number)
		if !ok {
			continue
		}
		whole, err := number.Int64()
		if err != nil {
			return nil, fmt.Errorf("detail %s: %w", name, err)
		}
		details[name] = whole
	}
	return details, nil
}

// operationWrites collects the operations of all buckets of a transaction.
type operationWrites struct {
	clear  []string
	insert []ledger.OperationRecord
}

func (w *operationWrites) add(view *ledger.View, effects *ledger.Effects) {
	switch effects.Row {
	case ledger.RowDelete:
		w.clear = append(w.clear, view.Key)
		return
	case ledger.RowInsert:
		w.clear = append(w.clear, view.Key)
	case ledger.RowUnchanged, ledger.RowUpdate:
	}
	w.insert = append(w.insert, effects.InsertOperations...)
}

func (w *operationWrites) queue(batch *pgx.Batch) error {
	if len(w.clear) > 0 {
		batch.Queue(deleteOperations, w.clear)
	}
	if len(w.insert) == 0 {
		return nil
	}
	details := make([]*string, len(w.insert))
	for i, o := range w.insert {
		if o.Details == nil {
			continue
		}
		encoded, err := json.Marshal(o.Details)
		if err != nil {
			return fmt.Errorf("details of operation %q: %w", o.ID, err)
		}
		details[i] = optional(string(encoded))
	}
	batch.Queue(insertOperations,
		column(w.insert, func(o ledger.OperationRecord) string { return o.BucketKey }),
		column(w.insert, func(o ledger.OperationRecord) string { return o.ID }),
		column(w.insert, func(o ledger.OperationRecord) string { return o.Inputs }),
		column(w.insert, func(o ledger.OperationRecord) *string { return optional(o.Code) }),
		column(w.insert, func(o ledger.OperationRecord) *string { return optional(o.Message) }),
		details,
		column(w.insert, func(o ledger.OperationRecord) time.Time { return o.At }))
	return nil
}
