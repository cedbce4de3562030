#!/bin/sh
# environments.sh HOST: write an environment file for each role, with a new password, into this directory.
set -eu
umask 077
host=${1:?give the host of the database, as in: environments.sh database}
password() { od -An -N24 -tx1 /dev/urandom | tr -d ' \n'; }

superuser=POSTGRES_PASSWORD=$(password)
for role in owner worker reader operator; do
    secret=$(password)
    echo "SQLQ_DATABASE_URL=postgresql+psycopg://shop_$role:$secret@$host/shop" >"$role.env"
    superuser="$superuser
SHOP_$(echo "$role" | tr '[:lower:]' '[:upper:]')_PASSWORD=$secret"
done
echo "$superuser" >superuser.env # for roles.sql alone
