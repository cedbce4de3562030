"""Every SQL statement sqlq sends, as functions of a synchronous Connection.

`jobs` is the hot path in the order of the flow, `records` the cold one, `cluster` what workers know of each
other. `dialect` has the differences between the databases; `database` opens sqlq's own connections and
transactions.
"""
