-- up
CREATE TABLE IF NOT EXISTS {prefix}sqlq_signals (
    name VARCHAR(255) NOT NULL PRIMARY KEY,
    value LONGTEXT,
    created_at DATETIME(6) NOT NULL DEFAULT UTC_TIMESTAMP(6),
    expires_at DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6) + INTERVAL 7 DAY),
    look_at DATETIME(6) DEFAULT UTC_TIMESTAMP(6),
    KEY sqlq_signals_look (look_at, name),
    KEY sqlq_signals_expire (expires_at),
    CONSTRAINT sqlq_signals_moments_in_range CHECK (
        created_at >= '1970-01-01' AND created_at < '9999-01-01'
        AND expires_at >= '1970-01-01' AND expires_at < '9999-01-01'
        AND look_at >= '1970-01-01' AND look_at < '9999-01-01')
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;

CREATE TABLE IF NOT EXISTS {prefix}sqlq_waits (
    job_id BIGINT NOT NULL PRIMARY KEY,
    name VARCHAR(255) NOT NULL,
    until DATETIME(6),
    look_at DATETIME(6) NOT NULL DEFAULT UTC_TIMESTAMP(6),
    outcome VARCHAR(7) CHECK (outcome IN ('signal', 'timeout')),
    value LONGTEXT,
    KEY sqlq_waits_look (look_at, job_id),
    KEY sqlq_waits_name (name, outcome, look_at),
    CONSTRAINT sqlq_waits_moments_in_range CHECK (
        until >= '1970-01-01' AND until < '9999-01-01'
        AND look_at >= '1970-01-01' AND look_at < '9999-01-01')
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin;

-- down

DROP TABLE IF EXISTS {prefix}sqlq_waits, {prefix}sqlq_signals;
