"""Every SQL statement sqlq sends, as functions of a synchronous Connection.

`jobs`, `flows`, `limits`, `schedules` and `workers` have the statements about each; `health` has those of the
doctor. `sqlq.database` opens the connections and has the differences between the databases.
"""
