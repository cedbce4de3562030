#!/bin/sh
# Restart one worker after the other, each when the one before it works again. Ends at the first that does not.
set -eu
for unit in $(systemctl list-units --plain --no-legend 'shop-worker@*' | cut -d ' ' -f 1); do
    systemctl restart "$unit"
done
