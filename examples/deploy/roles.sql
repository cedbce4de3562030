-- Once, as a superuser, in the database: set -a; . ./superuser.env; psql -d shop -f roles.sql
\getenv owner SHOP_OWNER_PASSWORD
\getenv worker SHOP_WORKER_PASSWORD
\getenv reader SHOP_READER_PASSWORD
\getenv operator SHOP_OPERATOR_PASSWORD
CREATE ROLE shop_owner LOGIN PASSWORD :'owner';
CREATE ROLE shop_worker LOGIN PASSWORD :'worker';
CREATE ROLE shop_reader LOGIN PASSWORD :'reader';
CREATE ROLE shop_operator LOGIN PASSWORD :'operator';
GRANT pg_read_all_stats TO shop_reader, shop_operator; -- for all checks of the doctor

ALTER DATABASE :"DBNAME" OWNER TO shop_owner;
REVOKE ALL ON DATABASE :"DBNAME" FROM PUBLIC;
GRANT CONNECT ON DATABASE :"DBNAME" TO shop_worker, shop_reader, shop_operator;
REVOKE CREATE ON SCHEMA public FROM PUBLIC;
GRANT CREATE ON SCHEMA public TO shop_owner;
