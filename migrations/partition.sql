-- Finished jobs in partitions, on PostgreSQL: the parts of `sqlq migrate --partition-finished`.

-- part: refuse
DO $sqlq$
DECLARE
    lost pg_catalog.text := (
        SELECT string_agg(DISTINCT pg_describe_object(d.classid, d.objid, 0), ', ')
          FROM pg_depend d LEFT JOIN pg_rewrite r ON d.classid = 'pg_rewrite'::regclass AND r.oid = d.objid
          LEFT JOIN pg_class v ON v.oid = r.ev_class
          LEFT JOIN pg_class i ON d.classid = 'pg_class'::regclass AND i.oid = d.objid
          LEFT JOIN pg_index x ON x.indexrelid = i.oid
          LEFT JOIN pg_constraint k ON d.classid = 'pg_constraint'::regclass AND k.oid = d.objid
         WHERE d.refclassid = 'pg_class'::regclass AND d.refobjid = '{table}'::regclass
           AND (d.classid IN ('pg_trigger'::regclass, 'pg_policy'::regclass, 'pg_publication_rel'::regclass,
                              'pg_proc'::regclass)
                OR v.relkind <> 'v' OR k.contype IN ('f', 'u', 'x')
                OR k.contype = 'c' AND k.conname <> 'finished_jobs_until'
                OR x.indisunique AND i.relname <> 'finished_jobs_by_id'));
BEGIN
    IF lost IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = '2BP01', MESSAGE = 'it would lose ' || lost;
    END IF;
END $sqlq$

-- part: key
CREATE UNIQUE INDEX CONCURRENTLY IF NOT EXISTS finished_jobs_by_id ON {table} (id, finished_at)

-- part: bound
ALTER TABLE {name} DROP CONSTRAINT IF EXISTS finished_jobs_until;
ALTER TABLE {name} ADD CONSTRAINT finished_jobs_until
    CHECK (finished_at >= '{low}' AND finished_at < '{high}') NOT VALID

-- part: swap
-- The table becomes the partition of all times up to `until`, and a partitioned one takes its place. What can be
-- made before it is locked is made before.
DO $sqlq$
DECLARE
    old pg_catalog.regclass := '{table}';
    until pg_catalog.text := {until};
    line pg_catalog.text;
    views pg_catalog.text[];
BEGIN
    CREATE TABLE {table}_new (LIKE {table} INCLUDING ALL EXCLUDING INDEXES EXCLUDING CONSTRAINTS,
        CONSTRAINT finished_jobs_pkey_new PRIMARY KEY (id, finished_at)) PARTITION BY RANGE (finished_at);
    COMMENT ON TABLE {table}_new IS 'sqlq makes partitions: {unit}';
    CREATE TABLE {table}_default PARTITION OF {table}_new DEFAULT;
    FOR line IN
        SELECT format('CREATE INDEX %I ON {table}_new %s', relname || '_new',
                      substr(pg_get_indexdef(c.oid), strpos(pg_get_indexdef(c.oid), ' USING ')))
          FROM pg_index JOIN pg_class c ON c.oid = indexrelid WHERE indrelid = old AND NOT indisunique
        UNION ALL
        SELECT format('GRANT %s ON {table}_new TO %s%s', what, CASE who WHEN 0 THEN 'PUBLIC'
                      ELSE quote_ident(pg_get_userbyid(who)) END,
                      CASE WHEN also THEN ' WITH GRANT OPTION' END)
          FROM (SELECT a.privilege_type, a.grantee, a.is_grantable
                  FROM pg_class, aclexplode(relacl) AS a WHERE oid = old AND a.grantee <> relowner
                UNION ALL
                SELECT format('%s (%I)', a.privilege_type, attname), a.grantee, a.is_grantable
                  FROM pg_attribute, aclexplode(attacl) AS a WHERE attrelid = old) AS rights (what, who, also)
    LOOP
        EXECUTE line;
    END LOOP;

    LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE;
    views := ARRAY(  -- while the name in their texts leads to the table
        SELECT DISTINCT format('CREATE OR REPLACE VIEW %I.%I%s AS %s', n.nspname, v.relname,
                               ' WITH (' || array_to_string(v.reloptions, ', ') || ')', pg_get_viewdef(v.oid))
          FROM pg_depend d JOIN pg_rewrite r ON d.classid = 'pg_rewrite'::regclass AND d.objid = r.oid
          JOIN pg_class v ON v.oid = r.ev_class JOIN pg_namespace n ON n.oid = v.relnamespace
         WHERE d.refclassid = 'pg_class'::regclass AND d.refobjid = old);
    FOR line IN
        SELECT format('ALTER INDEX %s RENAME TO %I', c.oid::regclass, left(relname, 56) || '_before')
          FROM pg_index JOIN pg_class c ON c.oid = indexrelid WHERE indrelid = old
    LOOP
        EXECUTE line;
    END LOOP;
    ALTER TABLE {table} RENAME TO finished_jobs_before;
    ALTER TABLE {table}_before DROP CONSTRAINT finished_jobs_pkey_before;
    ALTER TABLE {table}_before ADD CONSTRAINT finished_jobs_pkey_before
        PRIMARY KEY USING INDEX finished_jobs_by_id_before;
    ALTER TABLE {table}_new RENAME TO finished_jobs;
    FOR line IN
        SELECT format('ALTER INDEX %s RENAME TO %I', c.oid::regclass, left(relname, -4))
          FROM pg_index JOIN pg_class c ON c.oid = indexrelid WHERE indrelid = '{table}'::regclass
        UNION ALL
        SELECT unnest(views)
    LOOP
        EXECUTE line;
    END LOOP;
    EXECUTE format('ALTER TABLE {table} ATTACH PARTITION {table}_before '
                   'FOR VALUES FROM (MINVALUE) TO (%L)', until);
    ALTER TABLE {table}_before DROP CONSTRAINT IF EXISTS finished_jobs_until;
END $sqlq$

-- part: rotate
-- The default partition becomes that of a time which has none, and an empty one takes its place.
CREATE TABLE {table}_next (LIKE {table} INCLUDING ALL);
ALTER TABLE {table} DETACH PARTITION {name};
ALTER TABLE {name} RENAME TO {becomes};
ALTER TABLE {table} ATTACH PARTITION {place}{becomes} FOR VALUES FROM ('{low}') TO ('{high}');
ALTER TABLE {place}{becomes} DROP CONSTRAINT finished_jobs_until;
ALTER TABLE {table}_next RENAME TO finished_jobs_default;
ALTER TABLE {table} ATTACH PARTITION {table}_default DEFAULT
