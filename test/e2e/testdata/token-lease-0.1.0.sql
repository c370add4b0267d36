-- schema/postgres.sql of the npm package token-lease@0.1.0, word for word, under its license:
--
-- MIT License
--
-- Copyright (c) 2026 Sumin Lim
--
-- Permission is hereby granted, free of charge, to any person obtaining a copy
-- of this software and associated documentation files (the "Software"), to deal
-- in the Software without restriction, including without limitation the rights
-- to use, copy, modify, merge, publish, distribute, sublicense, and/or sell
-- copies of the Software, and to permit persons to whom the Software is
-- furnished to do so, subject to the following conditions:
--
-- The above copyright notice and this permission notice shall be included in all
-- copies or substantial portions of the Software.
--
-- THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR
-- IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY,
-- FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE
-- AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER
-- LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM,
-- OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE
-- SOFTWARE.

CREATE TABLE token_lease_buckets (
  bucket_key text PRIMARY KEY,
  revision bigint NOT NULL DEFAULT 1,
  state jsonb NOT NULL,
  updated_at timestamptz NOT NULL DEFAULT now(),
  CONSTRAINT token_lease_revision_range
    CHECK (revision BETWEEN 1 AND 9007199254740991),
  CONSTRAINT token_lease_state_object
    CHECK (jsonb_typeof(state) = 'object'),
  CONSTRAINT token_lease_state_bucket
    CHECK (
      state ? 'bucket'
      AND jsonb_typeof(state -> 'bucket') = 'string'
      AND state ->> 'bucket' = bucket_key
    ),
  CONSTRAINT token_lease_state_revision
    CHECK (
      state ? 'revision'
      AND jsonb_typeof(state -> 'revision') = 'number'
      AND state ->> 'revision' ~ '^(0|[1-9][0-9]*)$'
      AND (state ->> 'revision')::numeric = revision
    )
);
