-- Each statement can be repeated, since DDL commits at once.
CREATE TABLE IF NOT EXISTS {prefix}jobs (
    id BIGINT NOT NULL AUTO_INCREMENT,
    queue VARCHAR(255) NOT NULL DEFAULT 'default',
    task VARCHAR(255) NOT NULL,
    payload LONGTEXT NOT NULL DEFAULT '{}' CHECK (OCTET_LENGTH(payload) <= 1572864),
    priority SMALLINT NOT NULL DEFAULT 0 CHECK (priority BETWEEN -100 AND 100),
    attempts INT NOT NULL DEFAULT 0 CHECK (attempts BETWEEN 0 AND 1000000000),
    max_attempts INT CHECK (max_attempts BETWEEN 1 AND 1000000000),
    available_at DATETIME(6) NOT NULL DEFAULT UTC_TIMESTAMP(6),
    reserved_at DATETIME(6),
    reserved_by VARCHAR(36),
    lease_expires_at DATETIME(6),
    lease_token BIGINT NOT NULL DEFAULT 0 CHECK (lease_token BETWEEN 0 AND 4000000000000000000),
    unique_key VARCHAR(255),
    unique_until VARCHAR(6) NOT NULL DEFAULT 'finish' CHECK (unique_until IN ('finish', 'start', 'pruned')),
    on_success LONGTEXT CHECK (OCTET_LENGTH(on_success) <= 65536),
    on_failure LONGTEXT CHECK (OCTET_LENGTH(on_failure) <= 65536),
    timeout_ms BIGINT CHECK (timeout_ms BETWEEN 0 AND 3162240000000),
    releases INT NOT NULL DEFAULT 0 CHECK (releases BETWEEN 0 AND 1000000000),
    losses INT NOT NULL DEFAULT 0 CHECK (losses BETWEEN 0 AND 1000000000),
    unknown_since DATETIME(6),
    cancel_requested_at DATETIME(6),
    errors LONGTEXT CHECK (CHAR_LENGTH(errors) >= 2),
    headers LONGTEXT CHECK (OCTET_LENGTH(headers) <= 65536),
    label VARCHAR(255),
    batch_key VARCHAR(255),
    backoff LONGTEXT CHECK (OCTET_LENGTH(backoff) <= 65536),
    retention_ms BIGINT CHECK (retention_ms BETWEEN 0 AND 3162240000000),
    progress DOUBLE,
    progress_of DOUBLE,
    progress_note LONGTEXT,
    schedule VARCHAR(255),
    scheduled_for DATETIME(6),
    `cursor` LONGTEXT,
    start_by DATETIME(6),
    flow_id BIGINT,
    limit_key VARCHAR(255),
    blocked_by VARCHAR(5) CHECK (blocked_by IN ('flow', 'limit', 'event')),
    due_at DATETIME(6),
    replay_of BIGINT,
    created_at DATETIME(6) NOT NULL DEFAULT UTC_TIMESTAMP(6),
    live_key VARCHAR(255) AS (CASE WHEN unique_until <> 'start' OR lease_token = 0 THEN unique_key END) STORED INVISIBLE,
    PRIMARY KEY (id),
    UNIQUE KEY jobs_live_key (live_key, queue),
    KEY jobs_claim (reserved_at, queue, priority, available_at, id),
    KEY jobs_rescue (reserved_by, id),
    KEY jobs_unique_key (unique_key, queue),
    KEY jobs_flow (flow_id),
    KEY jobs_batch (batch_key),
    KEY jobs_line (blocked_by, limit_key, priority DESC, due_at, id),
    KEY jobs_line_by_id (blocked_by, limit_key, id),
    CONSTRAINT jobs_blocked_is_far CHECK ((blocked_by IS NULL) = (available_at < '9998-01-01')),
    CONSTRAINT jobs_reservation_is_whole CHECK ((reserved_at IS NULL) = (reserved_by IS NULL)
        AND (reserved_at IS NULL) = (lease_expires_at IS NULL)),
    CONSTRAINT jobs_moments_in_range CHECK (
        available_at >= '1970-01-01' AND available_at < '9999-01-01'
        AND reserved_at >= '1970-01-01' AND reserved_at < '9999-01-01'
        AND lease_expires_at >= '1970-01-01' AND lease_expires_at < '9999-01-01'
        AND unknown_since >= '1970-01-01' AND unknown_since < '9999-01-01'
        AND cancel_requested_at >= '1970-01-01' AND cancel_requested_at < '9999-01-01'
        AND scheduled_for >= '1970-01-01' AND scheduled_for < '9999-01-01'
        AND start_by >= '1970-01-01' AND start_by < '9999-01-01'
        AND due_at >= '1970-01-01' AND due_at < '9999-01-01'
        AND created_at >= '1970-01-01' AND created_at < '9999-01-01')
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;

CREATE TABLE IF NOT EXISTS {prefix}finished_jobs (
    id BIGINT NOT NULL,
    queue VARCHAR(255) NOT NULL,
    task VARCHAR(255) NOT NULL,
    payload LONGTEXT NOT NULL,
    priority SMALLINT NOT NULL,
    attempts INT NOT NULL,
    max_attempts INT,
    available_at DATETIME(6) NOT NULL,
    reserved_at DATETIME(6),
    reserved_by VARCHAR(36),
    lease_token BIGINT NOT NULL,
    unique_key VARCHAR(255),
    unique_until VARCHAR(6) NOT NULL,
    on_success LONGTEXT,
    on_failure LONGTEXT,
    timeout_ms BIGINT,
    releases INT NOT NULL,
    errors LONGTEXT,
    headers LONGTEXT,
    label VARCHAR(255),
    batch_key VARCHAR(255),
    backoff LONGTEXT,
    retention_ms BIGINT CHECK (retention_ms BETWEEN 0 AND 3162240000000),
    progress DOUBLE,
    progress_of DOUBLE,
    progress_note LONGTEXT,
    schedule VARCHAR(255),
    scheduled_for DATETIME(6),
    `cursor` LONGTEXT,
    start_by DATETIME(6),
    flow_id BIGINT,
    limit_key VARCHAR(255),
    replay_of BIGINT,
    created_at DATETIME(6) NOT NULL,
    outcome VARCHAR(9) NOT NULL CHECK (outcome IN ('finished', 'cancelled')),
    result LONGTEXT,
    reason LONGTEXT,
    finished_at DATETIME(6) NOT NULL DEFAULT UTC_TIMESTAMP(6),
    start_ms BIGINT,
    expires_at DATETIME(6) AS (finished_at + INTERVAL retention_ms * 1000 MICROSECOND) STORED,
    unblocks_at DATETIME(6) AS (CASE WHEN flow_id IS NOT NULL OR limit_key IS NOT NULL THEN finished_at END) STORED INVISIBLE,
    PRIMARY KEY (id),
    KEY finished_jobs_prune (expires_at, finished_at),
    KEY finished_jobs_flow (flow_id),
    KEY finished_jobs_batch (batch_key),
    KEY finished_jobs_unblock (unblocks_at),
    KEY finished_jobs_unique_key (unique_key, unique_until, queue),
    CONSTRAINT finished_jobs_moments_in_range CHECK (
        available_at >= '1970-01-01' AND available_at < '9999-01-01'
        AND reserved_at >= '1970-01-01' AND reserved_at < '9999-01-01'
        AND scheduled_for >= '1970-01-01' AND scheduled_for < '9999-01-01'
        AND start_by >= '1970-01-01' AND start_by < '9999-01-01'
        AND created_at >= '1970-01-01' AND created_at < '9999-01-01'
        AND finished_at >= '1970-01-01' AND finished_at < '9999-01-01'
        AND (retention_ms IS NULL OR expires_at IS NOT NULL AND expires_at < '9999-01-01'))
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;

CREATE TABLE IF NOT EXISTS {prefix}failed_jobs (
    id BIGINT NOT NULL,
    queue VARCHAR(255) NOT NULL,
    task VARCHAR(255) NOT NULL,
    payload LONGTEXT NOT NULL,
    priority SMALLINT NOT NULL,
    attempts INT NOT NULL,
    max_attempts INT,
    available_at DATETIME(6) NOT NULL,
    reserved_at DATETIME(6),
    reserved_by VARCHAR(36),
    lease_token BIGINT NOT NULL,
    unique_key VARCHAR(255),
    unique_until VARCHAR(6) NOT NULL,
    on_success LONGTEXT,
    on_failure LONGTEXT,
    timeout_ms BIGINT,
    releases INT NOT NULL,
    errors LONGTEXT,
    headers LONGTEXT,
    label VARCHAR(255),
    batch_key VARCHAR(255),
    backoff LONGTEXT,
    retention_ms BIGINT CHECK (retention_ms BETWEEN 0 AND 3162240000000),
    progress DOUBLE,
    progress_of DOUBLE,
    progress_note LONGTEXT,
    schedule VARCHAR(255),
    scheduled_for DATETIME(6),
    `cursor` LONGTEXT,
    start_by DATETIME(6),
    flow_id BIGINT,
    limit_key VARCHAR(255),
    replay_of BIGINT,
    created_at DATETIME(6) NOT NULL,
    reason VARCHAR(13) NOT NULL CHECK (reason IN
        ('error', 'timeout', 'worker_lost', 'unknown_task', 'bad_payload', 'bad_signature')),
    exception LONGTEXT,
    message LONGTEXT,
    traceback LONGTEXT,
    fingerprint VARCHAR(12) NOT NULL DEFAULT '',
    failed_at DATETIME(6) NOT NULL DEFAULT UTC_TIMESTAMP(6),
    start_ms BIGINT,
    expires_at DATETIME(6) AS (failed_at + INTERVAL retention_ms * 1000 MICROSECOND) STORED,
    unblocks_at DATETIME(6) AS (CASE WHEN flow_id IS NOT NULL OR limit_key IS NOT NULL THEN failed_at END) STORED INVISIBLE,
    sampled TINYINT AS (CASE WHEN MOD(id, 61) = 0 THEN 1 END) STORED INVISIBLE,
    PRIMARY KEY (id),
    KEY failed_jobs_prune (expires_at, failed_at),
    KEY failed_jobs_flow (flow_id),
    KEY failed_jobs_batch (batch_key),
    KEY failed_jobs_unblock (unblocks_at),
    KEY failed_jobs_unique_key (unique_key, unique_until, queue),
    KEY failed_jobs_limit (limit_key, id),
    KEY failed_jobs_error (queue, task, fingerprint, id, failed_at),
    KEY failed_jobs_sample (sampled, queue, task, fingerprint, id, failed_at),
    CONSTRAINT failed_jobs_moments_in_range CHECK (
        available_at >= '1970-01-01' AND available_at < '9999-01-01'
        AND reserved_at >= '1970-01-01' AND reserved_at < '9999-01-01'
        AND scheduled_for >= '1970-01-01' AND scheduled_for < '9999-01-01'
        AND start_by >= '1970-01-01' AND start_by < '9999-01-01'
        AND created_at >= '1970-01-01' AND created_at < '9999-01-01'
        AND failed_at >= '1970-01-01' AND failed_at < '9999-01-01'
        AND (retention_ms IS NULL OR expires_at IS NOT NULL AND expires_at < '9999-01-01'))
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;

CREATE TABLE IF NOT EXISTS {prefix}sqlq_workers (
    id VARCHAR(36) NOT NULL PRIMARY KEY,
    host TEXT NOT NULL,
    pid INT NOT NULL,
    supervisor_pid INT,
    version TEXT NOT NULL,
    queues LONGTEXT,
    concurrency INT NOT NULL,
    started_at DATETIME(6) NOT NULL DEFAULT UTC_TIMESTAMP(6),
    seen_at DATETIME(6) NOT NULL DEFAULT UTC_TIMESTAMP(6),
    name TEXT,
    state TEXT NOT NULL DEFAULT 'working',
    state_at DATETIME(6) NOT NULL DEFAULT UTC_TIMESTAMP(6),
    asked TEXT,
    asked_at DATETIME(6),
    cancels_at DATETIME(6),
    clock_at DATETIME(6),
    start_error TEXT,
    CONSTRAINT sqlq_workers_moments_in_range CHECK (
        started_at >= '1970-01-01' AND started_at < '9999-01-01'
        AND seen_at >= '1970-01-01' AND seen_at < '9999-01-01'
        AND state_at >= '1970-01-01' AND state_at < '9999-01-01'
        AND asked_at >= '1970-01-01' AND asked_at < '9999-01-01'
        AND cancels_at >= '1970-01-01' AND cancels_at < '9999-01-01'
        AND clock_at >= '1970-01-01' AND clock_at < '9999-01-01')
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;

CREATE TABLE IF NOT EXISTS {prefix}sqlq_queues (
    queue VARCHAR(255) NOT NULL PRIMARY KEY,
    paused_at DATETIME(6),
    paused_until DATETIME(6),
    CONSTRAINT sqlq_queues_moments_in_range CHECK (
        paused_at >= '1970-01-01' AND paused_at < '9999-01-01'
        AND paused_until >= '1970-01-01' AND paused_until < '9999-01-01')
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;

CREATE TABLE IF NOT EXISTS {prefix}sqlq_audit (
    id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    at DATETIME(6) NOT NULL DEFAULT UTC_TIMESTAMP(6),
    actor LONGTEXT NOT NULL,
    action LONGTEXT NOT NULL,
    target LONGTEXT NOT NULL,
    number BIGINT,
    database_user LONGTEXT DEFAULT USER(),
    seen_at DATETIME(6) NOT NULL DEFAULT UTC_TIMESTAMP(6),
    stopped_at DATETIME(6),
    ended_at DATETIME(6),
    CONSTRAINT sqlq_audit_moments_in_range CHECK (
        at >= '1970-01-01' AND at < '9999-01-01'
        AND seen_at >= '1970-01-01' AND seen_at < '9999-01-01'
        AND stopped_at >= '1970-01-01' AND stopped_at < '9999-01-01'
        AND ended_at >= '1970-01-01' AND ended_at < '9999-01-01')
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;

CREATE TABLE IF NOT EXISTS {prefix}sqlq_schedules (
    name VARCHAR(255) NOT NULL PRIMARY KEY,
    service VARCHAR(255),
    task VARCHAR(255) NOT NULL,
    queue VARCHAR(255) NOT NULL,
    payload LONGTEXT NOT NULL,
    options LONGTEXT NOT NULL DEFAULT '{}',
    plan LONGTEXT NOT NULL,
    declared_at DATETIME(6),
    paused_at DATETIME(6),
    retired_at DATETIME(6),
    last_at DATETIME(6) NOT NULL DEFAULT UTC_TIMESTAMP(6),
    next_at DATETIME(6),
    ticks INT NOT NULL DEFAULT 0 CHECK (ticks BETWEEN 0 AND 1000000000),
    skipped INT NOT NULL DEFAULT 0 CHECK (skipped BETWEEN 0 AND 1000000000),
    recent_jobs LONGTEXT NOT NULL DEFAULT '[]',
    error LONGTEXT,
    error_at DATETIME(6),
    created_at DATETIME(6) NOT NULL DEFAULT UTC_TIMESTAMP(6),
    KEY sqlq_schedules_due (next_at, name),
    CONSTRAINT sqlq_schedules_moments_in_range CHECK (
        declared_at >= '1970-01-01' AND declared_at < '9999-01-01'
        AND paused_at >= '1970-01-01' AND paused_at < '9999-01-01'
        AND retired_at >= '1970-01-01' AND retired_at < '9999-01-01'
        AND last_at >= '1970-01-01' AND last_at < '9999-01-01'
        AND next_at >= '1970-01-01' AND next_at < '9999-01-01'
        AND error_at >= '1970-01-01' AND error_at < '9999-01-01'
        AND created_at >= '1970-01-01' AND created_at < '9999-01-01')
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;

CREATE TABLE IF NOT EXISTS {prefix}sqlq_flows (
    id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    name VARCHAR(255),
    created_at DATETIME(6) NOT NULL DEFAULT UTC_TIMESTAMP(6),
    CONSTRAINT sqlq_flows_moments_in_range CHECK (
        created_at >= '1970-01-01' AND created_at < '9999-01-01')
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;

CREATE TABLE IF NOT EXISTS {prefix}sqlq_edges (
    job_id BIGINT NOT NULL,
    depends_on BIGINT NOT NULL,
    on_outcome VARCHAR(7) NOT NULL DEFAULT 'success' CHECK (on_outcome IN ('success', 'failure', 'ended', 'either')),
    place INT NOT NULL DEFAULT 0,
    PRIMARY KEY (job_id, depends_on),
    KEY sqlq_edges_parent (depends_on, job_id)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;

CREATE TABLE IF NOT EXISTS {prefix}sqlq_limits (
    limit_key VARCHAR(255) NOT NULL PRIMARY KEY,
    max_running INT CHECK (max_running BETWEEN 1 AND 1000000000),
    rate INT CHECK (rate BETWEEN 1 AND 1000000000),
    period_ms BIGINT CHECK (period_ms BETWEEN 0 AND 3162240000000),
    in_order BOOLEAN NOT NULL DEFAULT FALSE,
    holds BOOLEAN NOT NULL DEFAULT FALSE,
    next_free_at DATETIME(6),
    pinned_at DATETIME(6),
    used_at DATETIME(6) NOT NULL DEFAULT UTC_TIMESTAMP(6),
    KEY sqlq_limits_used (used_at),
    CONSTRAINT sqlq_limits_moments_in_range CHECK (
        next_free_at >= '1970-01-01' AND next_free_at < '9999-01-01'
        AND pinned_at >= '1970-01-01' AND pinned_at < '9999-01-01'
        AND used_at >= '1970-01-01' AND used_at < '9999-01-01')
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;

CREATE TABLE IF NOT EXISTS {prefix}sqlq_wakes (
    id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    at DATETIME(6) NOT NULL DEFAULT UTC_TIMESTAMP(6),
    limit_key VARCHAR(255) NOT NULL,
    max_running INT CHECK (max_running BETWEEN 1 AND 1000000000),
    rate INT CHECK (rate BETWEEN 1 AND 1000000000),
    period_ms BIGINT CHECK (period_ms BETWEEN 0 AND 3162240000000),
    in_order BOOLEAN NOT NULL DEFAULT FALSE,
    holds BOOLEAN NOT NULL DEFAULT FALSE,
    KEY sqlq_wakes_at (at, id),
    CONSTRAINT sqlq_wakes_moments_in_range CHECK (
        at >= '1970-01-01' AND at < '9999-01-01')
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;

CREATE OR REPLACE SQL SECURITY INVOKER VIEW {prefix}job_states AS
SELECT id, queue, task, CASE WHEN reserved_at IS NOT NULL THEN _utf8mb4'running' COLLATE utf8mb4_nopad_bin
            WHEN blocked_by IS NOT NULL THEN 'blocked'
            WHEN available_at <= UTC_TIMESTAMP(6) THEN 'available'
            ELSE 'scheduled' END AS state,
       priority, attempts, max_attempts,
       created_at, NULLIF(available_at, '9998-01-01') AS available_at, reserved_at, reserved_by,
       CAST(NULL AS DATETIME(6)) AS ended_at, CASE WHEN reserved_at IS NOT NULL THEN TIMESTAMPDIFF(MICROSECOND, available_at, reserved_at) / 1000000e0 WHEN available_at <= UTC_TIMESTAMP(6) THEN TIMESTAMPDIFF(MICROSECOND, available_at, UTC_TIMESTAMP(6)) / 1000000e0 END AS wait_seconds, CAST(NULL AS CHAR CHARACTER SET utf8mb4) AS error,
       label, headers, progress, progress_of, progress_note,
       schedule, scheduled_for, start_by, flow_id, limit_key, blocked_by AS blocked_by, replay_of, batch_key
  FROM {prefix}jobs
UNION ALL
SELECT id, queue, task, outcome AS state,
       priority, attempts, max_attempts,
       created_at, NULLIF(available_at, '9998-01-01') AS available_at, reserved_at, reserved_by,
       finished_at AS ended_at, TIMESTAMPDIFF(MICROSECOND, available_at, reserved_at) / 1000000e0 AS wait_seconds, reason AS error,
       label, headers, progress, progress_of, progress_note,
       schedule, scheduled_for, start_by, flow_id, limit_key, NULL AS blocked_by, replay_of, batch_key
  FROM {prefix}finished_jobs
UNION ALL
SELECT id, queue, task, _utf8mb4'failed' COLLATE utf8mb4_nopad_bin AS state,
       priority, attempts, max_attempts,
       created_at, NULLIF(available_at, '9998-01-01') AS available_at, reserved_at, reserved_by,
       failed_at AS ended_at, TIMESTAMPDIFF(MICROSECOND, available_at, reserved_at) / 1000000e0 AS wait_seconds, CASE WHEN exception IS NULL THEN reason ELSE CONCAT(exception, ': ', COALESCE(message, '')) END AS error,
       label, headers, progress, progress_of, progress_note,
       schedule, scheduled_for, start_by, flow_id, limit_key, NULL AS blocked_by, replay_of, batch_key
  FROM {prefix}failed_jobs;

CREATE OR REPLACE SQL SECURITY INVOKER VIEW {prefix}queue_stats AS
SELECT queue,
       CAST(SUM(available) AS SIGNED) AS available,
       CAST(SUM(scheduled) AS SIGNED) AS scheduled,
       CAST(SUM(blocked) AS SIGNED) AS blocked,
       CAST(SUM(running) AS SIGNED) AS running,
       CAST(SUM(failed) AS SIGNED) AS failed,
       MIN(oldest) AS oldest_available_at,
       TIMESTAMPDIFF(MICROSECOND, MIN(oldest), UTC_TIMESTAMP(6)) / 1000000e0 AS oldest_wait_seconds,
       CASE WHEN EXISTS (SELECT 1 FROM {prefix}sqlq_queues q
                          WHERE q.queue IN (counted.queue, '') AND q.paused_at IS NOT NULL)
            THEN 1 ELSE 0 END AS paused
  FROM (SELECT queue,
               COUNT(CASE WHEN reserved_at IS NULL AND available_at <= UTC_TIMESTAMP(6) THEN 1 END) AS available,
               COUNT(CASE WHEN reserved_at IS NULL AND blocked_by IS NULL AND available_at > UTC_TIMESTAMP(6)
                          THEN 1 END) AS scheduled,
               COUNT(blocked_by) AS blocked,
               COUNT(CASE WHEN reserved_at IS NOT NULL THEN 1 END) AS running,
               0 AS failed,
               MIN(CASE WHEN reserved_at IS NULL AND available_at <= UTC_TIMESTAMP(6) THEN available_at END) AS oldest
          FROM {prefix}jobs
         GROUP BY queue
        UNION ALL
        SELECT queue, 0, 0, 0, 0, COUNT(*), NULL
          FROM {prefix}failed_jobs
         GROUP BY queue) AS counted
 GROUP BY queue;

ALTER TABLE {prefix}sqlq_version ADD COLUMN IF NOT EXISTS oldest_code VARCHAR(32) DEFAULT '0001' NOT NULL;

-- down

-- the tables first, which may be locked, and no view can be dropped meanwhile
DROP TABLE IF EXISTS {prefix}sqlq_schedules,
    {prefix}sqlq_wakes,
    {prefix}sqlq_limits,
    {prefix}sqlq_edges,
    {prefix}sqlq_flows,
    {prefix}sqlq_audit,
    {prefix}sqlq_queues,
    {prefix}sqlq_workers,
    {prefix}failed_jobs,
    {prefix}finished_jobs,
    {prefix}jobs;

UNLOCK TABLES;

DROP VIEW IF EXISTS {prefix}queue_stats;

DROP VIEW IF EXISTS {prefix}job_states;

ALTER TABLE {prefix}sqlq_version DROP COLUMN IF EXISTS oldest_code;
