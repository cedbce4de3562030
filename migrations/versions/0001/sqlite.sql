-- SQLite alone lets any value into any column: its CHECKs have the types, too. A date as text compares greater
-- than every integer, so it would never be due. Text counts as larger than any limit. A time that Python cannot
-- read back would stop every claim of its queue, or every listing. The test of a type is written in the quickest
-- form. Where the largest id there can be was once given by hand, SQLite gives no more.
-- guard: numbers-in-range
CREATE TABLE jobs (
    id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    queue VARCHAR(255) DEFAULT 'default' NOT NULL,
    task VARCHAR(255) NOT NULL,
    payload TEXT DEFAULT '{}' NOT NULL,
    priority SMALLINT DEFAULT 0 NOT NULL,
    attempts INTEGER DEFAULT 0 NOT NULL,
    max_attempts INTEGER,
    available_at INTEGER DEFAULT (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)) NOT NULL,
    reserved_at INTEGER,
    reserved_by VARCHAR(36),
    lease_expires_at INTEGER,
    lease_token BIGINT DEFAULT 0 NOT NULL,
    unique_key VARCHAR(255),
    unique_until VARCHAR(6) DEFAULT 'finish' NOT NULL,
    on_success TEXT,
    on_failure TEXT,
    timeout_ms BIGINT,
    releases INTEGER DEFAULT 0 NOT NULL,
    losses INTEGER DEFAULT 0 NOT NULL,
    unknown_since INTEGER,
    cancel_requested_at INTEGER,
    errors TEXT,
    headers TEXT,
    label VARCHAR(255),
    batch_key VARCHAR(255),
    backoff TEXT,
    retention_ms BIGINT,
    progress DOUBLE PRECISION,
    progress_of DOUBLE PRECISION,
    progress_note TEXT,
    schedule VARCHAR(255),
    scheduled_for INTEGER,
    cursor TEXT,
    start_by INTEGER,
    flow_id BIGINT,
    limit_key VARCHAR(255),
    blocked_by VARCHAR(5),
    due_at INTEGER,
    replay_of BIGINT,
    created_at INTEGER DEFAULT (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)) NOT NULL,
    CONSTRAINT jobs_id_in_range CHECK (id BETWEEN 1 AND 4000000000000000000),
    CONSTRAINT jobs_priority_in_range CHECK (priority BETWEEN -100 AND 100),
    CONSTRAINT jobs_attempts_in_range CHECK (attempts BETWEEN 0 AND 1000000000
        AND max_attempts BETWEEN 1 AND 1000000000
        AND releases BETWEEN 0 AND 1000000000 AND losses BETWEEN 0 AND 1000000000
        AND lease_token BETWEEN 0 AND 4000000000000000000),
    CONSTRAINT jobs_timeout_in_range CHECK (timeout_ms BETWEEN 0 AND 3162240000000
        AND retention_ms BETWEEN 0 AND 3162240000000),
    CONSTRAINT jobs_errors_are_an_array CHECK (length(errors) >= 2),
    CONSTRAINT jobs_texts_are_bounded CHECK (length(CAST(payload AS BLOB)) <= 1572864
        AND length(CAST(on_success AS BLOB)) <= 65536 AND length(CAST(on_failure AS BLOB)) <= 65536
        AND length(CAST(headers AS BLOB)) <= 65536 AND length(CAST(backoff AS BLOB)) <= 65536),
    CONSTRAINT jobs_unique_until_known CHECK (unique_until IN ('finish', 'start', 'pruned')),
    CONSTRAINT jobs_blocked_by_known CHECK (blocked_by IN ('flow', 'limit', 'event')),
    CONSTRAINT jobs_blocked_is_far CHECK ((blocked_by IS NULL) = (available_at < 253339228800000)),
    CONSTRAINT jobs_reservation_is_whole
        CHECK ((reserved_at IS NULL) = (reserved_by IS NULL)
            AND (reserved_at IS NULL) = (lease_expires_at IS NULL)),
    CONSTRAINT jobs_moments_in_range CHECK (
        available_at >= 0 AND available_at < 253370764800000
        AND reserved_at >= 0 AND reserved_at < 253370764800000
        AND lease_expires_at >= 0 AND lease_expires_at < 253370764800000
        AND unknown_since >= 0 AND unknown_since < 253370764800000
        AND cancel_requested_at >= 0 AND cancel_requested_at < 253370764800000
        AND scheduled_for >= 0 AND scheduled_for < 253370764800000
        AND start_by >= 0 AND start_by < 253370764800000
        AND due_at >= 0 AND due_at < 253370764800000
        AND created_at >= 0 AND created_at < 253370764800000),
    CONSTRAINT jobs_times_are_integers CHECK (
        (available_at IS NULL OR typeof(available_at) = 'integer')
        AND (reserved_at IS NULL OR typeof(reserved_at) = 'integer')
        AND (lease_expires_at IS NULL OR typeof(lease_expires_at) = 'integer')
        AND (unknown_since IS NULL OR typeof(unknown_since) = 'integer')
        AND (cancel_requested_at IS NULL OR typeof(cancel_requested_at) = 'integer')
        AND (scheduled_for IS NULL OR typeof(scheduled_for) = 'integer')
        AND (start_by IS NULL OR typeof(start_by) = 'integer')
        AND (due_at IS NULL OR typeof(due_at) = 'integer')
        AND (created_at IS NULL OR typeof(created_at) = 'integer')),
    CONSTRAINT jobs_numbers_are_integers CHECK (
        (priority IS NULL OR typeof(priority) = 'integer')
        AND (attempts IS NULL OR typeof(attempts) = 'integer')
        AND (max_attempts IS NULL OR typeof(max_attempts) = 'integer')
        AND (lease_token IS NULL OR typeof(lease_token) = 'integer')
        AND (timeout_ms IS NULL OR typeof(timeout_ms) = 'integer')
        AND (retention_ms IS NULL OR typeof(retention_ms) = 'integer')
        AND (releases IS NULL OR typeof(releases) = 'integer')
        AND (losses IS NULL OR typeof(losses) = 'integer')
        AND (flow_id IS NULL OR typeof(flow_id) = 'integer')
        AND (replay_of IS NULL OR typeof(replay_of) = 'integer'))
);

CREATE TABLE finished_jobs (
    id INTEGER NOT NULL,
    queue VARCHAR(255) NOT NULL,
    task VARCHAR(255) NOT NULL,
    payload TEXT NOT NULL,
    priority SMALLINT NOT NULL,
    attempts INTEGER NOT NULL,
    max_attempts INTEGER,
    available_at INTEGER NOT NULL,
    reserved_at INTEGER,
    reserved_by VARCHAR(36),
    lease_token BIGINT NOT NULL,
    unique_key VARCHAR(255),
    unique_until VARCHAR(6) NOT NULL,
    on_success TEXT,
    on_failure TEXT,
    timeout_ms BIGINT,
    releases INTEGER NOT NULL,
    errors TEXT,
    headers TEXT,
    label VARCHAR(255),
    batch_key VARCHAR(255),
    backoff TEXT,
    retention_ms BIGINT,
    progress DOUBLE PRECISION,
    progress_of DOUBLE PRECISION,
    progress_note TEXT,
    schedule VARCHAR(255),
    scheduled_for INTEGER,
    cursor TEXT,
    start_by INTEGER,
    flow_id BIGINT,
    limit_key VARCHAR(255),
    replay_of BIGINT,
    created_at INTEGER NOT NULL,
    outcome VARCHAR(9) NOT NULL,
    result TEXT,
    reason TEXT,
    finished_at INTEGER DEFAULT (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)) NOT NULL,
    start_ms BIGINT,
    expires_at INTEGER GENERATED ALWAYS AS (finished_at + retention_ms) STORED,
    PRIMARY KEY (id),
    CONSTRAINT finished_jobs_outcome_known CHECK (outcome IN ('finished', 'cancelled')),
    CONSTRAINT finished_jobs_moments_in_range CHECK (
        available_at >= 0 AND available_at < 253370764800000
        AND reserved_at >= 0 AND reserved_at < 253370764800000
        AND scheduled_for >= 0 AND scheduled_for < 253370764800000
        AND start_by >= 0 AND start_by < 253370764800000
        AND created_at >= 0 AND created_at < 253370764800000
        AND finished_at >= 0 AND finished_at < 253370764800000
        AND expires_at >= 0 AND expires_at < 253370764800000),
    CONSTRAINT finished_jobs_times_are_integers CHECK (
        (available_at IS NULL OR typeof(available_at) = 'integer')
        AND (reserved_at IS NULL OR typeof(reserved_at) = 'integer')
        AND (scheduled_for IS NULL OR typeof(scheduled_for) = 'integer')
        AND (start_by IS NULL OR typeof(start_by) = 'integer')
        AND (created_at IS NULL OR typeof(created_at) = 'integer')
        AND (finished_at IS NULL OR typeof(finished_at) = 'integer'))
);

-- guard: moments-can-be-read-back
CREATE TABLE failed_jobs (
    id INTEGER NOT NULL,
    queue VARCHAR(255) NOT NULL,
    task VARCHAR(255) NOT NULL,
    payload TEXT NOT NULL,
    priority SMALLINT NOT NULL,
    attempts INTEGER NOT NULL,
    max_attempts INTEGER,
    available_at INTEGER NOT NULL,
    reserved_at INTEGER,
    reserved_by VARCHAR(36),
    lease_token BIGINT NOT NULL,
    unique_key VARCHAR(255),
    unique_until VARCHAR(6) NOT NULL,
    on_success TEXT,
    on_failure TEXT,
    timeout_ms BIGINT,
    releases INTEGER NOT NULL,
    errors TEXT,
    headers TEXT,
    label VARCHAR(255),
    batch_key VARCHAR(255),
    backoff TEXT,
    retention_ms BIGINT,
    progress DOUBLE PRECISION,
    progress_of DOUBLE PRECISION,
    progress_note TEXT,
    schedule VARCHAR(255),
    scheduled_for INTEGER,
    cursor TEXT,
    start_by INTEGER,
    flow_id BIGINT,
    limit_key VARCHAR(255),
    replay_of BIGINT,
    created_at INTEGER NOT NULL,
    reason VARCHAR(13) NOT NULL,
    exception TEXT,
    message TEXT,
    traceback TEXT,
    fingerprint VARCHAR(12) DEFAULT '' NOT NULL,
    failed_at INTEGER DEFAULT (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)) NOT NULL,
    start_ms BIGINT,
    expires_at INTEGER GENERATED ALWAYS AS (failed_at + retention_ms) STORED,
    PRIMARY KEY (id),
    CONSTRAINT failed_jobs_reason_known
        CHECK (reason IN ('error', 'timeout', 'worker_lost', 'unknown_task', 'bad_payload', 'bad_signature')),
    CONSTRAINT failed_jobs_moments_in_range CHECK (
        available_at >= 0 AND available_at < 253370764800000
        AND reserved_at >= 0 AND reserved_at < 253370764800000
        AND scheduled_for >= 0 AND scheduled_for < 253370764800000
        AND start_by >= 0 AND start_by < 253370764800000
        AND created_at >= 0 AND created_at < 253370764800000
        AND failed_at >= 0 AND failed_at < 253370764800000
        AND expires_at >= 0 AND expires_at < 253370764800000),
    CONSTRAINT failed_jobs_times_are_integers CHECK (
        (available_at IS NULL OR typeof(available_at) = 'integer')
        AND (reserved_at IS NULL OR typeof(reserved_at) = 'integer')
        AND (scheduled_for IS NULL OR typeof(scheduled_for) = 'integer')
        AND (start_by IS NULL OR typeof(start_by) = 'integer')
        AND (created_at IS NULL OR typeof(created_at) = 'integer')
        AND (failed_at IS NULL OR typeof(failed_at) = 'integer'))
);

CREATE TABLE sqlq_workers (
    id VARCHAR(36) NOT NULL,
    host TEXT NOT NULL,
    pid INTEGER NOT NULL,
    supervisor_pid INTEGER,
    version TEXT NOT NULL,
    queues TEXT,
    concurrency INTEGER NOT NULL,
    started_at INTEGER DEFAULT (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)) NOT NULL,
    seen_at INTEGER DEFAULT (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)) NOT NULL,
    name TEXT,
    state TEXT DEFAULT 'working' NOT NULL,
    state_at INTEGER DEFAULT (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)) NOT NULL,
    asked TEXT,
    asked_at INTEGER,
    cancels_at INTEGER,
    clock_at INTEGER,
    start_error TEXT,
    PRIMARY KEY (id),
    CONSTRAINT sqlq_workers_moments_in_range CHECK (
        started_at >= 0 AND started_at < 253370764800000
        AND seen_at >= 0 AND seen_at < 253370764800000
        AND state_at >= 0 AND state_at < 253370764800000
        AND asked_at >= 0 AND asked_at < 253370764800000
        AND cancels_at >= 0 AND cancels_at < 253370764800000
        AND clock_at >= 0 AND clock_at < 253370764800000),
    CONSTRAINT sqlq_workers_times_are_integers CHECK (
        (started_at IS NULL OR typeof(started_at) = 'integer')
        AND (seen_at IS NULL OR typeof(seen_at) = 'integer')
        AND (state_at IS NULL OR typeof(state_at) = 'integer')
        AND (asked_at IS NULL OR typeof(asked_at) = 'integer')
        AND (cancels_at IS NULL OR typeof(cancels_at) = 'integer')
        AND (clock_at IS NULL OR typeof(clock_at) = 'integer')),
    CONSTRAINT sqlq_workers_numbers_are_integers CHECK (
        (pid IS NULL OR typeof(pid) = 'integer')
        AND (supervisor_pid IS NULL OR typeof(supervisor_pid) = 'integer')
        AND (concurrency IS NULL OR typeof(concurrency) = 'integer')),
    CONSTRAINT sqlq_workers_texts_are_text CHECK (
        (id IS NULL OR typeof(id) = 'text')
        AND (host IS NULL OR typeof(host) = 'text')
        AND (version IS NULL OR typeof(version) = 'text')
        AND (queues IS NULL OR typeof(queues) = 'text')
        AND (name IS NULL OR typeof(name) = 'text')
        AND (state IS NULL OR typeof(state) = 'text')
        AND (asked IS NULL OR typeof(asked) = 'text')
        AND (start_error IS NULL OR typeof(start_error) = 'text'))
);

CREATE TABLE sqlq_queues (
    queue VARCHAR(255) NOT NULL,
    paused_at INTEGER,
    paused_until INTEGER,
    PRIMARY KEY (queue),
    CONSTRAINT sqlq_queues_moments_in_range CHECK (
        paused_at >= 0 AND paused_at < 253370764800000
        AND paused_until >= 0 AND paused_until < 253370764800000),
    CONSTRAINT sqlq_queues_times_are_integers CHECK (
        (paused_at IS NULL OR typeof(paused_at) = 'integer')
        AND (paused_until IS NULL OR typeof(paused_until) = 'integer')),
    CONSTRAINT sqlq_queues_texts_are_text CHECK ((queue IS NULL OR typeof(queue) = 'text'))
);

CREATE TABLE sqlq_audit (
    id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    at INTEGER DEFAULT (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)) NOT NULL,
    actor TEXT NOT NULL,
    action TEXT NOT NULL,
    target TEXT NOT NULL,
    number BIGINT,
    database_user TEXT DEFAULT NULL,
    seen_at INTEGER DEFAULT (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)) NOT NULL,
    stopped_at INTEGER,
    ended_at INTEGER,
    CONSTRAINT sqlq_audit_moments_in_range CHECK (
        at >= 0 AND at < 253370764800000
        AND seen_at >= 0 AND seen_at < 253370764800000
        AND stopped_at >= 0 AND stopped_at < 253370764800000
        AND ended_at >= 0 AND ended_at < 253370764800000),
    CONSTRAINT sqlq_audit_times_are_integers CHECK (
        (at IS NULL OR typeof(at) = 'integer')
        AND (seen_at IS NULL OR typeof(seen_at) = 'integer')
        AND (stopped_at IS NULL OR typeof(stopped_at) = 'integer')
        AND (ended_at IS NULL OR typeof(ended_at) = 'integer')),
    CONSTRAINT sqlq_audit_numbers_are_integers CHECK ((number IS NULL OR typeof(number) = 'integer')),
    CONSTRAINT sqlq_audit_texts_are_text CHECK (
        (actor IS NULL OR typeof(actor) = 'text')
        AND (action IS NULL OR typeof(action) = 'text')
        AND (target IS NULL OR typeof(target) = 'text')
        AND (database_user IS NULL OR typeof(database_user) = 'text'))
);

CREATE TABLE sqlq_schedules (
    name VARCHAR(255) NOT NULL,
    service VARCHAR(255),
    task VARCHAR(255) NOT NULL,
    queue VARCHAR(255) NOT NULL,
    payload TEXT NOT NULL,
    options TEXT DEFAULT '{}' NOT NULL,
    "plan" TEXT NOT NULL,
    declared_at INTEGER,
    paused_at INTEGER,
    retired_at INTEGER,
    last_at INTEGER DEFAULT (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)) NOT NULL,
    next_at INTEGER,
    ticks INTEGER DEFAULT 0 NOT NULL,
    skipped INTEGER DEFAULT 0 NOT NULL,
    recent_jobs TEXT DEFAULT '[]' NOT NULL,
    error TEXT,
    error_at INTEGER,
    created_at INTEGER DEFAULT (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)) NOT NULL,
    PRIMARY KEY (name),
    CONSTRAINT sqlq_schedules_counts_in_range
        CHECK (ticks BETWEEN 0 AND 1000000000 AND skipped BETWEEN 0 AND 1000000000),
    CONSTRAINT sqlq_schedules_moments_in_range CHECK (
        declared_at >= 0 AND declared_at < 253370764800000
        AND paused_at >= 0 AND paused_at < 253370764800000
        AND retired_at >= 0 AND retired_at < 253370764800000
        AND last_at >= 0 AND last_at < 253370764800000
        AND next_at >= 0 AND next_at < 253370764800000
        AND error_at >= 0 AND error_at < 253370764800000
        AND created_at >= 0 AND created_at < 253370764800000),
    CONSTRAINT sqlq_schedules_times_are_integers CHECK (
        (declared_at IS NULL OR typeof(declared_at) = 'integer')
        AND (paused_at IS NULL OR typeof(paused_at) = 'integer')
        AND (retired_at IS NULL OR typeof(retired_at) = 'integer')
        AND (last_at IS NULL OR typeof(last_at) = 'integer')
        AND (next_at IS NULL OR typeof(next_at) = 'integer')
        AND (error_at IS NULL OR typeof(error_at) = 'integer')
        AND (created_at IS NULL OR typeof(created_at) = 'integer')),
    CONSTRAINT sqlq_schedules_numbers_are_integers CHECK (
        (ticks IS NULL OR typeof(ticks) = 'integer')
        AND (skipped IS NULL OR typeof(skipped) = 'integer')),
    CONSTRAINT sqlq_schedules_texts_are_text CHECK (
        (name IS NULL OR typeof(name) = 'text')
        AND (service IS NULL OR typeof(service) = 'text')
        AND (task IS NULL OR typeof(task) = 'text')
        AND (queue IS NULL OR typeof(queue) = 'text')
        AND (payload IS NULL OR typeof(payload) = 'text')
        AND (options IS NULL OR typeof(options) = 'text')
        AND (plan IS NULL OR typeof(plan) = 'text')
        AND (recent_jobs IS NULL OR typeof(recent_jobs) = 'text'))
);

CREATE TABLE sqlq_flows (
    id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    name VARCHAR(255),
    created_at INTEGER DEFAULT (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)) NOT NULL,
    CONSTRAINT sqlq_flows_moments_in_range CHECK (created_at >= 0 AND created_at < 253370764800000),
    CONSTRAINT sqlq_flows_times_are_integers CHECK (
        (created_at IS NULL OR typeof(created_at) = 'integer')),
    CONSTRAINT sqlq_flows_texts_are_text CHECK ((name IS NULL OR typeof(name) = 'text'))
);

-- No foreign keys: each end of a job would look for the edges that name it.
CREATE TABLE sqlq_edges (
    job_id BIGINT NOT NULL,
    depends_on BIGINT NOT NULL,
    on_outcome VARCHAR(7) DEFAULT 'success' NOT NULL,
    place INTEGER DEFAULT 0 NOT NULL,
    PRIMARY KEY (job_id, depends_on),
    CONSTRAINT sqlq_edges_on_outcome_known CHECK (on_outcome IN ('success', 'failure', 'ended', 'either')),
    CONSTRAINT sqlq_edges_numbers_are_integers CHECK (
        (job_id IS NULL OR typeof(job_id) = 'integer')
        AND (depends_on IS NULL OR typeof(depends_on) = 'integer')
        AND (place IS NULL OR typeof(place) = 'integer'))
) WITHOUT ROWID;

CREATE TABLE sqlq_limits (
    limit_key VARCHAR(255) NOT NULL,
    max_running INTEGER,
    rate INTEGER,
    period_ms BIGINT,
    in_order BOOLEAN DEFAULT false NOT NULL,
    holds BOOLEAN DEFAULT false NOT NULL,
    next_free_at INTEGER,
    pinned_at INTEGER,
    used_at INTEGER DEFAULT (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)) NOT NULL,
    PRIMARY KEY (limit_key),
    CONSTRAINT sqlq_limits_in_range CHECK (max_running BETWEEN 1 AND 1000000000
        AND rate BETWEEN 1 AND 1000000000
        AND period_ms BETWEEN 0 AND 3162240000000),
    CONSTRAINT sqlq_limits_moments_in_range CHECK (
        next_free_at >= 0 AND next_free_at < 253370764800000
        AND pinned_at >= 0 AND pinned_at < 253370764800000
        AND used_at >= 0 AND used_at < 253370764800000),
    CONSTRAINT sqlq_limits_times_are_integers CHECK (
        (next_free_at IS NULL OR typeof(next_free_at) = 'integer')
        AND (pinned_at IS NULL OR typeof(pinned_at) = 'integer')
        AND (used_at IS NULL OR typeof(used_at) = 'integer')),
    CONSTRAINT sqlq_limits_numbers_are_integers CHECK (
        (max_running IS NULL OR typeof(max_running) = 'integer')
        AND (rate IS NULL OR typeof(rate) = 'integer')
        AND (period_ms IS NULL OR typeof(period_ms) = 'integer')),
    CONSTRAINT sqlq_limits_texts_are_text CHECK ((limit_key IS NULL OR typeof(limit_key) = 'text'))
);

CREATE TABLE sqlq_wakes (
    id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    at INTEGER DEFAULT (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)) NOT NULL,
    limit_key VARCHAR(255) NOT NULL,
    max_running INTEGER,
    rate INTEGER,
    period_ms BIGINT,
    in_order BOOLEAN DEFAULT false NOT NULL,
    holds BOOLEAN DEFAULT false NOT NULL,
    CONSTRAINT sqlq_wakes_in_range CHECK (max_running BETWEEN 1 AND 1000000000
        AND rate BETWEEN 1 AND 1000000000
        AND period_ms BETWEEN 0 AND 3162240000000),
    CONSTRAINT sqlq_wakes_moments_in_range CHECK (at >= 0 AND at < 253370764800000),
    CONSTRAINT sqlq_wakes_times_are_integers CHECK ((at IS NULL OR typeof(at) = 'integer')),
    CONSTRAINT sqlq_wakes_numbers_are_integers CHECK (
        (max_running IS NULL OR typeof(max_running) = 'integer')
        AND (rate IS NULL OR typeof(rate) = 'integer')
        AND (period_ms IS NULL OR typeof(period_ms) = 'integer')),
    CONSTRAINT sqlq_wakes_texts_are_text CHECK ((limit_key IS NULL OR typeof(limit_key) = 'text'))
);

CREATE INDEX jobs_claim ON jobs (queue, priority DESC, available_at, id) WHERE reserved_at IS NULL;

CREATE UNIQUE INDEX jobs_unique_key ON jobs (queue, unique_key) WHERE unique_key IS NOT NULL
    AND (unique_until <> 'start' OR lease_token = 0);

CREATE INDEX jobs_rescue ON jobs (reserved_by, id) WHERE reserved_at IS NOT NULL;

CREATE INDEX sqlq_schedules_due ON sqlq_schedules (next_at, name) WHERE next_at IS NOT NULL;

CREATE INDEX jobs_admitted ON jobs (limit_key) WHERE limit_key IS NOT NULL AND blocked_by IS NULL;

CREATE INDEX jobs_line ON jobs (limit_key, priority DESC, due_at, id) WHERE blocked_by = 'limit';

CREATE INDEX jobs_line_by_id ON jobs (limit_key, id) WHERE blocked_by = 'limit';

CREATE INDEX jobs_flow ON jobs (flow_id, id) WHERE flow_id IS NOT NULL;

CREATE INDEX jobs_batch ON jobs (batch_key, id) WHERE batch_key IS NOT NULL;

CREATE INDEX finished_jobs_flow ON finished_jobs (flow_id, id) WHERE flow_id IS NOT NULL;

CREATE INDEX finished_jobs_batch ON finished_jobs (batch_key, id) WHERE batch_key IS NOT NULL;

CREATE INDEX failed_jobs_flow ON failed_jobs (flow_id, id) WHERE flow_id IS NOT NULL;

CREATE INDEX failed_jobs_batch ON failed_jobs (batch_key, id) WHERE batch_key IS NOT NULL;

CREATE INDEX finished_jobs_unblock ON finished_jobs (finished_at)
    WHERE flow_id IS NOT NULL OR limit_key IS NOT NULL;

CREATE INDEX failed_jobs_unblock ON failed_jobs (failed_at) WHERE flow_id IS NOT NULL OR limit_key IS NOT NULL;

CREATE INDEX finished_jobs_unique_key ON finished_jobs (queue, unique_key) WHERE unique_until = 'pruned';

CREATE INDEX failed_jobs_unique_key ON failed_jobs (queue, unique_key) WHERE unique_until = 'pruned';

CREATE INDEX failed_jobs_limit ON failed_jobs (limit_key, id) WHERE limit_key IS NOT NULL;

CREATE INDEX failed_jobs_error ON failed_jobs (queue, task, fingerprint, id, failed_at);

CREATE INDEX failed_jobs_sample ON failed_jobs (queue, task, fingerprint, id, failed_at)
    WHERE id % 61 = 0;

CREATE INDEX sqlq_edges_parent ON sqlq_edges (depends_on, job_id);

CREATE INDEX sqlq_limits_used ON sqlq_limits (used_at);

CREATE INDEX sqlq_wakes_at ON sqlq_wakes (at, id);

CREATE INDEX finished_jobs_prune ON finished_jobs (finished_at, id) WHERE expires_at IS NULL;

CREATE INDEX finished_jobs_expire ON finished_jobs (expires_at, id) WHERE expires_at IS NOT NULL;

CREATE INDEX failed_jobs_prune ON failed_jobs (failed_at, id) WHERE expires_at IS NULL;

CREATE INDEX failed_jobs_expire ON failed_jobs (expires_at, id) WHERE expires_at IS NOT NULL;

CREATE VIEW job_states AS
SELECT id, queue, task,
       CASE WHEN reserved_at IS NOT NULL THEN 'running'
            WHEN blocked_by IS NOT NULL THEN 'blocked'
            WHEN available_at <= CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)
                THEN 'available'
            ELSE 'scheduled' END AS state,
       priority, attempts, max_attempts,
       strftime('%Y-%m-%dT%H:%M:%fZ', created_at / 1000.0, 'unixepoch') AS created_at,
       strftime('%Y-%m-%dT%H:%M:%fZ', NULLIF(available_at, 253339228800000) / 1000.0, 'unixepoch') AS available_at,
       strftime('%Y-%m-%dT%H:%M:%fZ', reserved_at / 1000.0, 'unixepoch') AS reserved_at, reserved_by,
       strftime('%Y-%m-%dT%H:%M:%fZ', NULL / 1000.0, 'unixepoch') AS ended_at,
       CASE WHEN reserved_at IS NOT NULL THEN ((reserved_at - available_at) / 1000.0)
            WHEN available_at <= CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)
                THEN ((CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) - available_at) / 1000.0) END AS wait_seconds,
       CAST(NULL AS TEXT) AS error,
       label, headers, progress, progress_of, progress_note,
       schedule, strftime('%Y-%m-%dT%H:%M:%fZ', scheduled_for / 1000.0, 'unixepoch') AS scheduled_for,
       strftime('%Y-%m-%dT%H:%M:%fZ', start_by / 1000.0, 'unixepoch') AS start_by,
       flow_id, limit_key, blocked_by, replay_of, batch_key
  FROM jobs
UNION ALL
SELECT id, queue, task,
       outcome,
       priority, attempts, max_attempts,
       strftime('%Y-%m-%dT%H:%M:%fZ', created_at / 1000.0, 'unixepoch'),
       strftime('%Y-%m-%dT%H:%M:%fZ', NULLIF(available_at, 253339228800000) / 1000.0, 'unixepoch'),
       strftime('%Y-%m-%dT%H:%M:%fZ', reserved_at / 1000.0, 'unixepoch'), reserved_by,
       strftime('%Y-%m-%dT%H:%M:%fZ', finished_at / 1000.0, 'unixepoch'),
       ((reserved_at - available_at) / 1000.0), reason,
       label, headers, progress, progress_of, progress_note,
       schedule, strftime('%Y-%m-%dT%H:%M:%fZ', scheduled_for / 1000.0, 'unixepoch'),
       strftime('%Y-%m-%dT%H:%M:%fZ', start_by / 1000.0, 'unixepoch'),
       flow_id, limit_key, NULL, replay_of, batch_key
  FROM finished_jobs
UNION ALL
SELECT id, queue, task, 'failed',
       priority, attempts, max_attempts,
       strftime('%Y-%m-%dT%H:%M:%fZ', created_at / 1000.0, 'unixepoch'),
       strftime('%Y-%m-%dT%H:%M:%fZ', NULLIF(available_at, 253339228800000) / 1000.0, 'unixepoch'),
       strftime('%Y-%m-%dT%H:%M:%fZ', reserved_at / 1000.0, 'unixepoch'), reserved_by,
       strftime('%Y-%m-%dT%H:%M:%fZ', failed_at / 1000.0, 'unixepoch'),
       ((reserved_at - available_at) / 1000.0),
       CASE WHEN exception IS NULL THEN reason ELSE exception || ': ' || COALESCE(message, '') END,
       label, headers, progress, progress_of, progress_note,
       schedule, strftime('%Y-%m-%dT%H:%M:%fZ', scheduled_for / 1000.0, 'unixepoch'),
       strftime('%Y-%m-%dT%H:%M:%fZ', start_by / 1000.0, 'unixepoch'),
       flow_id, limit_key, NULL, replay_of, batch_key
  FROM failed_jobs;

CREATE VIEW queue_stats AS
SELECT queue,
       CAST(SUM(available) AS BIGINT) AS available,
       CAST(SUM(scheduled) AS BIGINT) AS scheduled,
       CAST(SUM(blocked) AS BIGINT) AS blocked,
       CAST(SUM(running) AS BIGINT) AS running,
       CAST(SUM(failed) AS BIGINT) AS failed,
       strftime('%Y-%m-%dT%H:%M:%fZ', MIN(oldest) / 1000.0, 'unixepoch') AS oldest_available_at,
       ((CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) - MIN(oldest)) / 1000.0) AS oldest_wait_seconds,
       CASE WHEN EXISTS (SELECT 1 FROM sqlq_queues q
                          WHERE q.queue IN (counted.queue, '') AND q.paused_at IS NOT NULL)
            THEN 1 ELSE 0 END AS paused
  FROM (SELECT queue,
               COUNT(CASE WHEN reserved_at IS NULL
                   AND available_at <= CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)
                   THEN 1 END) AS available,
               COUNT(CASE WHEN reserved_at IS NULL AND blocked_by IS NULL
                   AND available_at > CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)
                          THEN 1 END) AS scheduled,
               COUNT(blocked_by) AS blocked,
               COUNT(CASE WHEN reserved_at IS NOT NULL THEN 1 END) AS running,
               0 AS failed,
               MIN(CASE WHEN reserved_at IS NULL
                   AND available_at <= CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)
                   THEN available_at END) AS oldest
          FROM jobs
         GROUP BY queue
        UNION ALL
        SELECT queue, 0, 0, 0, 0, COUNT(*), NULL
          FROM failed_jobs
         GROUP BY queue) AS counted
 GROUP BY queue;

ALTER TABLE sqlq_version ADD COLUMN oldest_code VARCHAR(32) DEFAULT '0001' NOT NULL;

-- down

DROP VIEW IF EXISTS queue_stats;

DROP VIEW IF EXISTS job_states;

DROP TABLE sqlq_schedules;

DROP TABLE sqlq_wakes;

DROP TABLE sqlq_limits;

DROP TABLE sqlq_edges;

DROP TABLE sqlq_flows;

DROP TABLE sqlq_audit;

DROP TABLE sqlq_queues;

DROP TABLE sqlq_workers;

DROP TABLE failed_jobs;

DROP TABLE finished_jobs;

DROP TABLE jobs;

ALTER TABLE sqlq_version DROP COLUMN oldest_code;
