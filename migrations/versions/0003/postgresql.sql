-- up
CREATE TABLE {prefix}sqlq_signals (
    name VARCHAR(255) NOT NULL PRIMARY KEY,
    value TEXT,
    created_at {prefix}sqlq_moment DEFAULT statement_timestamp() NOT NULL,
    expires_at {prefix}sqlq_moment DEFAULT statement_timestamp() + interval '7 days' NOT NULL,
    look_at {prefix}sqlq_moment DEFAULT statement_timestamp()
);

CREATE TABLE {prefix}sqlq_waits (
    job_id BIGINT NOT NULL PRIMARY KEY,
    name VARCHAR(255) NOT NULL,
    until {prefix}sqlq_moment,
    look_at {prefix}sqlq_moment DEFAULT statement_timestamp() NOT NULL,
    outcome VARCHAR(7) CONSTRAINT sqlq_waits_outcome_known CHECK (outcome IN ('signal', 'timeout')),
    value TEXT
);

CREATE INDEX sqlq_signals_look ON {prefix}sqlq_signals (look_at, name) WHERE look_at IS NOT NULL;

CREATE INDEX sqlq_signals_expire ON {prefix}sqlq_signals (expires_at);

CREATE INDEX sqlq_waits_look ON {prefix}sqlq_waits (look_at, job_id);

CREATE INDEX sqlq_waits_name ON {prefix}sqlq_waits (name, outcome, look_at);

-- down

DROP TABLE {prefix}sqlq_waits;

DROP TABLE {prefix}sqlq_signals;
