-- +goose Up

-- Every key is compared byte for byte (COLLATE "C"), and starts with the bucket
-- key, so that a bucket with all its rows can live on one shard. Token counts lie
-- within 0..2^53-1. NULL means "none".

-- The one clock of the ledger, cut off to milliseconds. clock_timestamp() moves on
-- within a transaction, so a transaction that waited for a lock reads the time
-- after the wait.
-- +goose StatementBegin
CREATE FUNCTION tokenlease.ledger_now() RETURNS timestamptz
    LANGUAGE sql VOLATILE
    AS $$ SELECT pg_catalog.date_trunc('milliseconds', pg_catalog.clock_timestamp()) $$;
-- +goose StatementEnd

-- require ends the transaction when a statement did not find the rows that it must
-- find: what was decided no longer holds, and it has to be decided again.
-- +goose StatementBegin
CREATE FUNCTION tokenlease.require(actual bigint, expected bigint, what text) RETURNS void
    LANGUAGE plpgsql VOLATILE
    AS $$
BEGIN
    IF actual IS DISTINCT FROM expected THEN
        RAISE EXCEPTION USING
            ERRCODE = 'TL001',
            MESSAGE = pg_catalog.format('%s: %s rows found, %s expected', what, actual, expected);
    END IF;
END
$$;
-- +goose StatementEnd

-- What holds for one column is said by its type, which is checked when the column is
-- written. A CHECK of the table is read again by each statement that writes a row of
-- it, whatever it writes, so there are few of these.
CREATE DOMAIN tokenlease.tokens AS bigint
    CONSTRAINT tokens_range CHECK (VALUE BETWEEN 0 AND 9007199254740991);
CREATE DOMAIN tokenlease.counter AS bigint
    CONSTRAINT counter_range CHECK (VALUE >= 0);
CREATE DOMAIN tokenlease.positive_tokens AS bigint
    CONSTRAINT positive_tokens_range CHECK (VALUE BETWEEN 1 AND 9007199254740991);
CREATE DOMAIN tokenlease.milliseconds AS bigint
    CONSTRAINT milliseconds_positive CHECK (VALUE > 0);
CREATE DOMAIN tokenlease.lease_state AS text COLLATE "C"
    CONSTRAINT lease_state_value CHECK (VALUE IN ('reserved', 'committed', 'released', 'expired'));
CREATE DOMAIN tokenlease.hash AS bytea
    CONSTRAINT hash_length CHECK (octet_length(VALUE) = 32);

CREATE DOMAIN tokenlease.bucket_key AS text COLLATE "C"
    CONSTRAINT bucket_key_length CHECK (char_length(VALUE) BETWEEN 1 AND 200);
CREATE DOMAIN tokenlease.lease_id AS text COLLATE "C"
    CONSTRAINT lease_id_length CHECK (char_length(VALUE) BETWEEN 1 AND 128);
CREATE DOMAIN tokenlease.conflict_policy AS text
    CONSTRAINT conflict_policy_value CHECK (VALUE IN ('Review', 'Overwrite'));
CREATE DOMAIN tokenlease.settlement_policy AS text
    CONSTRAINT settlement_policy_value CHECK (VALUE IN ('Strict', 'RecordActual'));
CREATE DOMAIN tokenlease.cadence AS text
    CONSTRAINT cadence_value CHECK (VALUE IN ('Hour', 'Day', 'Week', 'Month', 'Year'));
CREATE DOMAIN tokenlease.raise_mode AS text
    CONSTRAINT raise_mode_value CHECK (VALUE IN ('Enforce', 'ObserveOnly', 'Disabled'));

-- The row is the lock and the timer of its bucket. Room is left on its page and no
-- index covers what an ordinary operation changes, so that updates stay on the page.
CREATE TABLE tokenlease.buckets (
    bucket_key             tokenlease.bucket_key NOT NULL,
    owner_cluster          text COLLATE "C",
    owner_namespace        text COLLATE "C",
    owner_name             text COLLATE "C",
    owner_uid              text COLLATE "C",
    owner_created_at       timestamptz,
    retired_uid            text COLLATE "C",
    tenant_id              text COLLATE "C",
    scoped_key_id          text COLLATE "C",
    limit_tokens           tokenlease.tokens NOT NULL,
    used_tokens            tokenlease.tokens NOT NULL,
    reserved_tokens        tokenlease.tokens NOT NULL,
    declared_limit_tokens  tokenlease.tokens,
    declared_generation    tokenlease.counter NOT NULL,
    conflict_policy        tokenlease.conflict_policy,
    default_ttl_ms         tokenlease.milliseconds NOT NULL,
    max_ttl_ms             tokenlease.milliseconds NOT NULL,
    max_records            tokenlease.tokens NOT NULL,
    settlement_policy      tokenlease.settlement_policy NOT NULL DEFAULT 'Strict',
    raise_mode             tokenlease.raise_mode,
    raise_max_limit_tokens tokenlease.tokens NOT NULL,
    raise_max_duration_ms  tokenlease.counter NOT NULL,
    active_raise_id        text COLLATE "C",
    limit_epoch            tokenlease.counter NOT NULL,
    lease_records          tokenlease.counter NOT NULL,
    audit_sequence         tokenlease.counter NOT NULL,
    revision               tokenlease.counter NOT NULL,
    expired_through        timestamptz NOT NULL DEFAULT '-infinity',
    next_transition_at     timestamptz NOT NULL DEFAULT 'infinity',
    retention_ms           tokenlease.counter NOT NULL DEFAULT 0,
    purged_through         timestamptz,
    period_every           tokenlease.cadence,
    period_time_zone       text COLLATE "C",
    period_start           timestamptz,
    period_end             timestamptz,
    closed_at              timestamptz,
    created_at             timestamptz NOT NULL,
    updated_at             timestamptz NOT NULL,
    CONSTRAINT buckets_pkey PRIMARY KEY (bucket_key),
    CONSTRAINT buckets_owner CHECK (num_nonnulls(owner_cluster, owner_namespace, owner_name, owner_uid, owner_created_at) IN (0, 5)
        AND (owner_name IS NOT NULL OR declared_limit_tokens IS NULL)),
    CONSTRAINT buckets_reserved_range CHECK (reserved_tokens <= 9007199254740991 - used_tokens),
    CONSTRAINT buckets_settings CHECK (default_ttl_ms <= max_ttl_ms),
    CONSTRAINT buckets_period CHECK ((period_every IS NULL) = (period_time_zone IS NULL) AND period_end > period_start),
    CONSTRAINT buckets_instants CHECK (updated_at >= created_at)
) WITH (fillfactor = 60);

-- Callers name a bucket by the object that declares it.
CREATE INDEX buckets_owned ON tokenlease.buckets (owner_namespace, owner_name) WHERE owner_name IS NOT NULL;
-- Most buckets have nothing due, so the index is small.
CREATE INDEX buckets_due ON tokenlease.buckets (next_transition_at) WHERE next_transition_at < 'infinity';

-- Leases do not reference their bucket: they are written under its row's lock and
-- removed with it, and a check of each of a thousand rows would prove the same.
--
-- The primary key is what makes a request idempotent. A lease ID that the ledger
-- made holds the request hash, so the same index finds a lease by its ID; only
-- imported leases have IDs of another make. No index covers what changes when a
-- lease is settled, and room is left on its page, so settling writes no index.
CREATE TABLE tokenlease.leases (
    bucket_key       tokenlease.bucket_key NOT NULL,
    lease_id         tokenlease.lease_id NOT NULL,
    request_hash     tokenlease.hash NOT NULL,
    fingerprint_hash tokenlease.hash NOT NULL,
    state            tokenlease.lease_state NOT NULL,
    reserved_tokens  tokenlease.positive_tokens NOT NULL,
    actual_tokens    tokenlease.tokens,
    ttl_ms           tokenlease.milliseconds NOT NULL,
    created_at       timestamptz NOT NULL,
    expires_at       timestamptz NOT NULL,
    settled_at       timestamptz,
    scoped_key_id    text COLLATE "C",
    raise_id         text COLLATE "C",
    refused_tokens   tokenlease.tokens,
    refused_commits  tokenlease.counter NOT NULL DEFAULT 0,
    imported_at      timestamptz,
    late             boolean NOT NULL DEFAULT false,
    holder           text COLLATE "C",
    period_start     timestamptz,
    CONSTRAINT leases_pkey PRIMARY KEY (bucket_key, request_hash),
    CONSTRAINT leases_refused CHECK ((refused_tokens IS NULL) = (refused_commits = 0)),
    CONSTRAINT leases_state CHECK ((settled_at IS NULL) = (state = 'reserved')
        AND (actual_tokens IS NULL) = (state <> 'committed') AND (state = 'committed' OR NOT late)),
    CONSTRAINT leases_settled_in_time CHECK (expires_at > created_at AND settled_at >= created_at AND (settled_at >= expires_at) = (state = 'expired' OR late))
) WITH (fillfactor = 60);

-- What is overdue is found from where the bucket's last search ended, and pages of
-- a long history cost what they show. The condition, which is always true, keeps the
-- index from statements that do not compare expires_at: a server that knows nothing
-- of the table yet might take it to find a lease by its request, and keep the plan.
CREATE INDEX leases_expiry ON tokenlease.leases (bucket_key, expires_at) WHERE expires_at IS NOT NULL;
CREATE UNIQUE INDEX leases_imported ON tokenlease.leases (bucket_key, lease_id) WHERE imported_at IS NOT NULL;

-- Ended periods. A lease settles in the one that it was reserved in, under its
-- bucket's lock. What was counted before a bucket's first period began at -infinity.
CREATE TABLE tokenlease.periods (
    bucket_key      tokenlease.bucket_key NOT NULL,
    started_at      timestamptz NOT NULL,
    ended_at        timestamptz NOT NULL,
    limit_tokens    tokenlease.tokens NOT NULL,
    used_tokens     tokenlease.tokens NOT NULL,
    reserved_tokens tokenlease.tokens NOT NULL,
    CONSTRAINT periods_pkey PRIMARY KEY (bucket_key, started_at),
    CONSTRAINT periods_instants CHECK (ended_at > started_at),
    CONSTRAINT periods_reserved_range CHECK (reserved_tokens <= 9007199254740991 - used_tokens)
);

-- What leases have used that were purged, by what tells finance whose it was. '' stands
-- for none, and -infinity for the time before the first period, so that the key is
-- whole.
CREATE TABLE tokenlease.rollups (
    bucket_key       tokenlease.bucket_key NOT NULL,
    period_start     timestamptz NOT NULL,
    hour             timestamptz NOT NULL,
    cluster          text COLLATE "C" NOT NULL,
    namespace        text COLLATE "C" NOT NULL,
    tenant_id        text COLLATE "C" NOT NULL,
    scoped_key_id    text COLLATE "C" NOT NULL,
    raise_id         text COLLATE "C" NOT NULL,
    late             boolean NOT NULL,
    used_tokens      tokenlease.counter NOT NULL,
    committed_leases tokenlease.counter NOT NULL,
    released_leases  tokenlease.counter NOT NULL,
    expired_leases   tokenlease.counter NOT NULL,
    CONSTRAINT rollups_pkey PRIMARY KEY (bucket_key, period_start, hour, cluster, namespace, tenant_id, scoped_key_id, raise_id, late)
);

CREATE INDEX periods_live ON tokenlease.periods (bucket_key) WHERE reserved_tokens > 0;

CREATE TABLE tokenlease.raises (
    bucket_key             text COLLATE "C" NOT NULL,
    raise_id               text COLLATE "C" NOT NULL,
    cluster                text COLLATE "C" NOT NULL,
    namespace              text COLLATE "C" NOT NULL,
    name                   text COLLATE "C" NOT NULL,
    current_uid            text COLLATE "C" NOT NULL,
    current_created_at     timestamptz NOT NULL,
    tenant_id              text COLLATE "C" NOT NULL,
    scoped_key_id          text COLLATE "C" NOT NULL,
    normal_limit_tokens    bigint NOT NULL,
    temporary_limit_tokens bigint NOT NULL,
    applied_limit_tokens   bigint,
    restore_to_tokens      bigint,
    limit_epoch            bigint NOT NULL,
    starts_at              timestamptz NOT NULL,
    expires_at             timestamptz NOT NULL,
    approval_id            text COLLATE "C" NOT NULL,
    actor                  text,
    purpose                text,
    grant_hash             text COLLATE "C" NOT NULL,
    on_base_change         text NOT NULL,
    state                  text COLLATE "C" NOT NULL,
    reason                 text,
    review_required        boolean NOT NULL,
    observed_limit_tokens  bigint,
    version                bigint NOT NULL,
    stored_at              timestamptz NOT NULL,
    activated_at           timestamptz,
    ended_at               timestamptz,
    mismatch_since         timestamptz,
    observed_at            timestamptz,
    -- A claim of whoever asked, which nobody has checked.
    on_behalf_of           text,
    CONSTRAINT raises_pkey PRIMARY KEY (bucket_key, raise_id),
    -- One object stands for one raise of a bucket.
    CONSTRAINT raises_current_key UNIQUE (bucket_key, current_uid, cluster),
    CONSTRAINT raises_limits CHECK (normal_limit_tokens >= 0 AND temporary_limit_tokens > normal_limit_tokens
        AND temporary_limit_tokens <= 9007199254740991),
    CONSTRAINT raises_applied CHECK (applied_limit_tokens BETWEEN 0 AND 9007199254740991
        AND restore_to_tokens BETWEEN 0 AND 9007199254740991
        AND (applied_limit_tokens IS NULL) = (restore_to_tokens IS NULL)
        AND (applied_limit_tokens IS NULL) = (activated_at IS NULL)
        AND (limit_epoch = 0) = (activated_at IS NULL)),
    CONSTRAINT raises_window CHECK (expires_at >= starts_at),
    CONSTRAINT raises_mismatch CHECK (mismatch_since IS NULL OR state = 'pending'),
    CONSTRAINT raises_review CHECK (NOT review_required OR (state = 'failed' AND activated_at IS NOT NULL)),
    CONSTRAINT raises_observed_range CHECK (observed_limit_tokens BETWEEN 0 AND 9007199254740991),
    CONSTRAINT raises_on_base_change CHECK (on_base_change IN ('Review', 'Rebase')),
    CONSTRAINT raises_state CHECK (
        (state = 'pending' AND activated_at IS NULL AND ended_at IS NULL)
        OR (state IN ('active', 'restoring') AND activated_at IS NOT NULL AND ended_at IS NULL)
        OR (state = 'restored' AND activated_at IS NOT NULL AND ended_at IS NOT NULL)
        OR (state = 'failed' AND ended_at IS NOT NULL)),
    CONSTRAINT raises_counters CHECK (version >= 0 AND limit_epoch >= 0)
) WITH (fillfactor = 80);

CREATE UNIQUE INDEX raises_one_active ON tokenlease.raises (bucket_key) INCLUDE (expires_at)
    WHERE state IN ('active', 'restoring');
CREATE INDEX raises_live ON tokenlease.raises (bucket_key, raise_id)
    WHERE state IN ('pending', 'active', 'restoring');
CREATE INDEX raises_review ON tokenlease.raises (bucket_key) WHERE review_required;
CREATE INDEX raises_grant ON tokenlease.raises (bucket_key, grant_hash);
-- Readers who know an object and not its bucket ask all shards. These are not
-- unique: what is unique begins with the bucket key.
CREATE INDEX raises_object ON tokenlease.raises (raise_id);
CREATE INDEX raises_current_uid ON tokenlease.raises (current_uid);

-- A raise that a bucket points at cannot be removed: without it nothing would ever
-- take its limit back. The pointer is written before the raise, hence deferred.
ALTER TABLE tokenlease.buckets ADD CONSTRAINT buckets_active_raise
    FOREIGN KEY (bucket_key, active_raise_id) REFERENCES tokenlease.raises (bucket_key, raise_id)
    DEFERRABLE INITIALLY DEFERRED;

-- An approval is spent once within its namespace and tenant, whatever the bucket.
-- It is the one table whose key does not begin with the bucket's.
CREATE TABLE tokenlease.approvals (
    cluster     text COLLATE "C" NOT NULL,
    namespace   text COLLATE "C" NOT NULL,
    tenant_id   text COLLATE "C" NOT NULL,
    approval_id text COLLATE "C" NOT NULL,
    raise_id    text COLLATE "C" NOT NULL,
    bucket_key  text COLLATE "C" NOT NULL,
    spent_at    timestamptz NOT NULL,
    CONSTRAINT approvals_pkey PRIMARY KEY (cluster, namespace, tenant_id, approval_id)
);

CREATE TABLE tokenlease.operations (
    bucket_key   text COLLATE "C" NOT NULL,
    operation_id text COLLATE "C" NOT NULL,
    inputs       text NOT NULL,
    code         text,
    message      text,
    details      jsonb,
    recorded_at  timestamptz NOT NULL,
    -- An effect of a raise, which is remembered for good.
    of_raise     boolean NOT NULL GENERATED ALWAYS AS (operation_id ~ ':(activate|restore|revoke|observe-activate|observe-restore)$') STORED,
    CONSTRAINT operations_pkey PRIMARY KEY (bucket_key, operation_id),
    CONSTRAINT operations_id_length CHECK (char_length(operation_id) BETWEEN 1 AND 512)
);

-- What is older than its bucket's retention is found by its age.
CREATE INDEX operations_age ON tokenlease.operations (bucket_key, recorded_at) WHERE NOT of_raise;

CREATE TABLE tokenlease.audit (
    bucket_key             text COLLATE "C" NOT NULL,
    sequence               bigint NOT NULL,
    event                  text NOT NULL,
    outcome                text NOT NULL,
    reason                 text,
    operation_id           text COLLATE "C",
    raise_id               text COLLATE "C",
    raise_version          bigint NOT NULL DEFAULT 0,
    cluster                text,
    namespace              text,
    owner_name             text,
    tenant_id              text,
    scoped_key_id          text,
    bucket_scoped_key_id   text,
    approval_id            text,
    actor                  text,
    worker                 text,
    trigger_operation      text,
    requested_limit_tokens bigint,
    prior_limit_tokens     bigint,
    effective_limit_tokens bigint,
    declared_limit_tokens  bigint,
    used_tokens            bigint NOT NULL,
    reserved_tokens        bigint NOT NULL,
    limit_epoch            bigint NOT NULL,
    due_at                 timestamptz,
    recorded_at            timestamptz NOT NULL,
    lease_id               text COLLATE "C",
    tokens                 tokenlease.tokens,
    on_behalf_of           text,
    CONSTRAINT audit_pkey PRIMARY KEY (bucket_key, sequence),
    CONSTRAINT audit_sequence CHECK (sequence >= 1),
    CONSTRAINT audit_event CHECK (char_length(event) BETWEEN 1 AND 64),
    CONSTRAINT audit_outcome CHECK (outcome IN ('applied', 'refused', 'kept', 'waiting', 'observed')),
    CONSTRAINT audit_limits CHECK (requested_limit_tokens BETWEEN 0 AND 9007199254740991
        AND prior_limit_tokens BETWEEN 0 AND 9007199254740991
        AND effective_limit_tokens BETWEEN 0 AND 9007199254740991
        AND declared_limit_tokens BETWEEN 0 AND 9007199254740991),
    CONSTRAINT audit_usage CHECK (used_tokens BETWEEN 0 AND 9007199254740991
        AND reserved_tokens BETWEEN 0 AND 9007199254740991 - used_tokens)
);

-- A raise is put in force once and taken back once.
CREATE UNIQUE INDEX audit_one_effect ON tokenlease.audit (bucket_key, operation_id)
    WHERE event IN ('RaiseActivated', 'RaiseRestored');

-- +goose StatementBegin
CREATE FUNCTION tokenlease.refuse_audit_change() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
    RAISE EXCEPTION USING
        ERRCODE = 'TL002',
        MESSAGE = 'tokenlease.audit is append-only: ' || TG_OP || ' is refused';
END
$$;
-- +goose StatementEnd

CREATE TRIGGER audit_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON tokenlease.audit
    FOR EACH STATEMENT EXECUTE FUNCTION tokenlease.refuse_audit_change();

-- Whoever names the limit advances limit_epoch in the same statement; the ledger
-- does. Another hand, which does not know of it, takes the limit away from the
-- raise that set it, also when the value stays equal, leaves a line in the audit,
-- and makes the bucket due so that the raise is ended at once.
-- +goose StatementBegin
CREATE FUNCTION tokenlease.take_limit() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    AS $$
DECLARE
    clock timestamptz := tokenlease.ledger_now();
BEGIN
    IF NEW.limit_epoch < OLD.limit_epoch THEN
        RAISE EXCEPTION USING
            ERRCODE = 'TL003',
            MESSAGE = 'limit_epoch of tokenlease.buckets never goes back';
    END IF;
    NEW.active_raise_id := NULL;
    NEW.limit_epoch := OLD.limit_epoch + 1;
    NEW.revision := OLD.revision + 1;
    NEW.audit_sequence := OLD.audit_sequence + 1;
    NEW.next_transition_at := clock;
    NEW.updated_at := greatest(OLD.updated_at, clock);
    INSERT INTO tokenlease.audit (
        bucket_key, sequence, event, outcome, reason, raise_id, raise_version,
        cluster, namespace, owner_name, tenant_id, scoped_key_id, bucket_scoped_key_id, approval_id,
        actor, worker, trigger_operation,
        requested_limit_tokens, prior_limit_tokens, effective_limit_tokens, declared_limit_tokens,
        used_tokens, reserved_tokens, limit_epoch, recorded_at)
    SELECT
        NEW.bucket_key, NEW.audit_sequence, 'LimitChangedOutsideLedger', 'applied', 'LimitChanged',
        OLD.active_raise_id, coalesce(r.version, 0),
        NEW.owner_cluster, NEW.owner_namespace, NEW.owner_name, NEW.tenant_id, r.scoped_key_id, NEW.scoped_key_id,
        r.approval_id, session_user, nullif(current_setting('application_name'), ''), 'sql',
        NEW.limit_tokens, OLD.limit_tokens, NEW.limit_tokens, NEW.declared_limit_tokens,
        NEW.used_tokens, NEW.reserved_tokens, NEW.limit_epoch, NEW.updated_at
    FROM (SELECT 1) AS one
    LEFT JOIN tokenlease.raises AS r ON r.bucket_key = OLD.bucket_key AND r.raise_id = OLD.active_raise_id;
    RETURN NEW;
END
$$;
-- +goose StatementEnd

CREATE TRIGGER buckets_limit_taken BEFORE UPDATE OF limit_tokens ON tokenlease.buckets
    FOR EACH ROW WHEN (NEW.limit_epoch <= OLD.limit_epoch) EXECUTE FUNCTION tokenlease.take_limit();

-- The ledger says in its transactions that it is the writer. A row that another
-- hand inserts, such as one from a backup, is of another time: it takes its place
-- behind what the audit tells, keeps its raise only if that is in force as the row
-- says, gives up the limit that a raise had set which is not, counts what the leases
-- say that are there, in the period that has begun since, and is due, so that whatever
-- time has made due since is performed.
-- +goose StatementBegin
CREATE FUNCTION tokenlease.place_row() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    AS $$
DECLARE
    clock timestamptz := tokenlease.ledger_now();
    last_sequence bigint;
    last_epoch bigint;
    raise tokenlease.raises;
    begun timestamptz;
BEGIN
    SELECT coalesce(max(a.sequence), 0), coalesce(max(a.limit_epoch), 0) INTO last_sequence, last_epoch
    FROM tokenlease.audit AS a
    WHERE a.bucket_key = NEW.bucket_key;
    SELECT r.* INTO raise
    FROM tokenlease.raises AS r
    WHERE r.bucket_key = NEW.bucket_key AND r.raise_id = NEW.active_raise_id;
    IF NEW.limit_epoch < last_epoch
        OR (raise.state, raise.limit_epoch, raise.applied_limit_tokens)
            IS DISTINCT FROM ('active', NEW.limit_epoch, NEW.limit_tokens)
    THEN
        NEW.limit_tokens := coalesce(raise.restore_to_tokens, NEW.limit_tokens);
        NEW.active_raise_id := NULL;
        NEW.limit_epoch := greatest(NEW.limit_epoch, last_epoch) + 1;
    END IF;
    begun := greatest(
        (SELECT max(p.ended_at) FROM tokenlease.periods AS p WHERE p.bucket_key = NEW.bucket_key),
        (SELECT max(l.period_start) FROM tokenlease.leases AS l WHERE l.bucket_key = NEW.bucket_key),
        (SELECT max(r.period_start) FROM tokenlease.rollups AS r WHERE r.bucket_key = NEW.bucket_key));
    IF begun > coalesce(NEW.period_start, '-infinity') THEN
        -- What the row counts is of a period that has ended, and stands there. The end of
        -- the one that has begun is that of the calendar.
        NEW.used_tokens := 0;
        NEW.reserved_tokens := 0;
        NEW.period_start := begun;
        NEW.period_end := CASE WHEN NEW.period_every IS NOT NULL THEN greatest(begun + interval '1 millisecond',
            (date_trunc(NEW.period_every, begun AT TIME ZONE NEW.period_time_zone) + ('1 ' || NEW.period_every)::interval)
                AT TIME ZONE NEW.period_time_zone) END;
    END IF;
    begun := coalesce(NEW.period_start, '-infinity');
    -- What was used within a period only grows.
    NEW.used_tokens := greatest(NEW.used_tokens,
        (SELECT coalesce(sum(l.actual_tokens), 0) FROM tokenlease.leases AS l
            WHERE l.bucket_key = NEW.bucket_key AND l.state = 'committed' AND coalesce(l.period_start, '-infinity') = begun)
        + (SELECT coalesce(sum(r.used_tokens), 0) FROM tokenlease.rollups AS r
            WHERE r.bucket_key = NEW.bucket_key AND r.period_start = begun));
    IF EXISTS (SELECT FROM tokenlease.leases AS l WHERE l.bucket_key = NEW.bucket_key) THEN
        SELECT count(*), coalesce(sum(l.reserved_tokens)
            FILTER (WHERE l.state = 'reserved' AND coalesce(l.period_start, '-infinity') = begun), 0)
        INTO NEW.lease_records, NEW.reserved_tokens
        FROM tokenlease.leases AS l
        WHERE l.bucket_key = NEW.bucket_key;
    END IF;
    NEW.audit_sequence := greatest(NEW.audit_sequence, last_sequence) + 1;
    NEW.revision := NEW.revision + 1;
    NEW.expired_through := '-infinity';
    NEW.next_transition_at := clock;
    NEW.updated_at := greatest(NEW.created_at, NEW.updated_at, clock);
    RETURN NEW;
END
$$;
-- +goose StatementEnd

CREATE TRIGGER buckets_row_placed BEFORE INSERT ON tokenlease.buckets
    FOR EACH ROW WHEN (current_setting('tokenlease.writer', true) IS DISTINCT FROM 'ledger')
    EXECUTE FUNCTION tokenlease.place_row();

-- The evidence of it is written once the row is there: an INSERT may find another
-- one, and do nothing.
-- +goose StatementBegin
CREATE FUNCTION tokenlease.note_row() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    AS $$
BEGIN
    INSERT INTO tokenlease.audit (
        bucket_key, sequence, event, outcome, raise_id, cluster, namespace, owner_name, tenant_id, bucket_scoped_key_id,
        actor, worker, trigger_operation, effective_limit_tokens, declared_limit_tokens,
        used_tokens, reserved_tokens, limit_epoch, recorded_at)
    VALUES (
        NEW.bucket_key, NEW.audit_sequence, 'BucketInsertedOutsideLedger', 'applied', NEW.active_raise_id,
        NEW.owner_cluster, NEW.owner_namespace, NEW.owner_name, NEW.tenant_id, NEW.scoped_key_id,
        session_user, nullif(current_setting('application_name'), ''), 'sql', NEW.limit_tokens, NEW.declared_limit_tokens,
        NEW.used_tokens, NEW.reserved_tokens, NEW.limit_epoch, NEW.updated_at);
    RETURN NULL;
END
$$;
-- +goose StatementEnd

CREATE TRIGGER buckets_row_noted AFTER INSERT ON tokenlease.buckets
    FOR EACH ROW WHEN (current_setting('tokenlease.writer', true) IS DISTINCT FROM 'ledger')
    EXECUTE FUNCTION tokenlease.note_row();

-- A reserved lease that another hand brings back, such as one from a backup, may
-- expire before where the search for overdue ones has come: it begins anew.
-- +goose StatementBegin
CREATE FUNCTION tokenlease.search_again() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    AS $$
BEGIN
    UPDATE tokenlease.buckets AS b SET expired_through = '-infinity'
    WHERE b.bucket_key = NEW.bucket_key AND b.expired_through >= NEW.expires_at;
    RETURN NULL;
END
$$;
-- +goose StatementEnd

CREATE TRIGGER leases_row_placed AFTER INSERT ON tokenlease.leases
    FOR EACH ROW WHEN (NEW.state = 'reserved' AND current_setting('tokenlease.writer', true) IS DISTINCT FROM 'ledger')
    EXECUTE FUNCTION tokenlease.search_again();

-- grant_runtime gives a role what the running ledger needs and nothing more: no
-- DDL, and the evidence can be added to but not changed.
-- +goose StatementBegin
CREATE FUNCTION tokenlease.grant_runtime(runtime_role name) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
    AS $$
BEGIN
    EXECUTE format('GRANT USAGE ON SCHEMA tokenlease TO %I', runtime_role);
    EXECUTE format('GRANT SELECT, INSERT, UPDATE, DELETE ON tokenlease.buckets, tokenlease.leases, tokenlease.periods, tokenlease.rollups, '
        'tokenlease.approvals, tokenlease.operations TO %I', runtime_role);
    EXECUTE format('GRANT SELECT, INSERT, UPDATE ON tokenlease.raises TO %I', runtime_role);
    EXECUTE format('GRANT SELECT, INSERT ON tokenlease.audit TO %I', runtime_role);
    EXECUTE format('GRANT SELECT ON tokenlease.schema_version TO %I', runtime_role);
    EXECUTE format('GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA tokenlease TO %I', runtime_role);
END
$$;
-- +goose StatementEnd
