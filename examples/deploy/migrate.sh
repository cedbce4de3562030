#!/bin/sh
# As the owner, in each deploy before the new workers start: the tables, and what each role may do with them.
set -eu
sqlq migrate --wait 5m
for role in worker reader operator; do
    sqlq grants "shop_$role" --as "$role" --apply
done
