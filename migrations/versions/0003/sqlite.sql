-- up
CREATE TABLE sqlq_signals (
    name VARCHAR(255) NOT NULL,
    value TEXT,
    created_at INTEGER DEFAULT (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)) NOT NULL,
    expires_at INTEGER DEFAULT (CAST(ROUND((julianday('now') - 2440580.5) * 86400000.0) AS INTEGER)) NOT NULL,
    look_at INTEGER DEFAULT (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)),
    PRIMARY KEY (name),
    CONSTRAINT sqlq_signals_moments_in_range CHECK (
        created_at >= 0 AND created_at < 253370764800000
        AND expires_at >= 0 AND expires_at < 253370764800000
        AND look_at >= 0 AND look_at < 253370764800000),
    CONSTRAINT sqlq_signals_times_are_integers CHECK (
        typeof(created_at) = 'integer'
        AND typeof(expires_at) = 'integer'
        AND (look_at IS NULL OR typeof(look_at) = 'integer')),
    CONSTRAINT sqlq_signals_texts_are_text CHECK (
        typeof(name) = 'text' AND (value IS NULL OR typeof(value) = 'text'))
);

CREATE TABLE sqlq_waits (
    job_id BIGINT NOT NULL PRIMARY KEY,
    name VARCHAR(255) NOT NULL,
    until INTEGER,
    look_at INTEGER DEFAULT (CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)) NOT NULL,
    outcome VARCHAR(7),
    value TEXT,
    CONSTRAINT sqlq_waits_outcome_known CHECK (outcome IN ('signal', 'timeout')),
    CONSTRAINT sqlq_waits_moments_in_range CHECK (
        until >= 0 AND until < 253370764800000
        AND look_at >= 0 AND look_at < 253370764800000),
    CONSTRAINT sqlq_waits_times_are_integers CHECK (
        (until IS NULL OR typeof(until) = 'integer') AND typeof(look_at) = 'integer'),
    CONSTRAINT sqlq_waits_texts_are_text CHECK (
        typeof(name) = 'text'
        AND (outcome IS NULL OR typeof(outcome) = 'text')
        AND (value IS NULL OR typeof(value) = 'text'))
);

CREATE INDEX sqlq_signals_look ON sqlq_signals (look_at, name) WHERE look_at IS NOT NULL;

CREATE INDEX sqlq_signals_expire ON sqlq_signals (expires_at);

CREATE INDEX sqlq_waits_look ON sqlq_waits (look_at, job_id);

CREATE INDEX sqlq_waits_name ON sqlq_waits (name, outcome, look_at);

-- down

DROP TABLE sqlq_waits;

DROP TABLE sqlq_signals;
