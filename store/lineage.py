"""Where a number came from, as SQL: three table macros that live in the catalog, for any query to use.

select * from lineage('evaluation/0123456789ab')                every artifact it was made from, itself at depth 0
select path, sha256 from lineage_files(…) where kind = 'tokens' the files of those: token shards by digest
select purpose, sum(dollars) from lineage_calls(…) group by 1   the teacher and judge calls behind them
"""

LINEAGE = """
CREATE OR REPLACE MACRO lineage(artifact_id) AS TABLE
WITH RECURSIVE up(id, depth, name, made) AS (
    SELECT id, 0, NULL::VARCHAR, NULL::VARCHAR FROM artifacts WHERE id = artifact_id
    UNION
    SELECT a.id, up.depth + 1, i.name, i.artifact
    FROM up JOIN inputs i ON i.artifact = up.id
    JOIN artifacts a ON a.kind = i.kind AND a.key = i.key AND (
        a.execution = i.execution
        -- the very making that was read is gone: what now has its key is the nearest there is
        OR (a.superseded = 0 AND NOT EXISTS (
            SELECT 1 FROM artifacts x WHERE x.kind = i.kind AND x.key = i.key AND x.execution = i.execution)))
)
SELECT up.depth, up.name, up.made, a.* FROM up JOIN artifacts a USING (id) ORDER BY up.depth, a.kind, a.id
"""

LINEAGE_FILES = """
CREATE OR REPLACE MACRO lineage_files(artifact_id) AS TABLE
SELECT a.id AS artifact, a.kind, a.stage, f.key AS path,
       (f.value->>'bytes')::BIGINT AS bytes, f.value->>'sha256' AS sha256
FROM artifacts a, json_each(a.files) f
WHERE a.id IN (SELECT id FROM lineage(artifact_id)) ORDER BY a.kind, a.id, path
"""

LINEAGE_CALLS = """
CREATE OR REPLACE MACRO lineage_calls(artifact_id) AS TABLE
SELECT c.* FROM calls c WHERE c.execution IN (SELECT execution FROM lineage(artifact_id)) ORDER BY c.time, c.id
"""

MACROS = (LINEAGE, LINEAGE_FILES, LINEAGE_CALLS)

# What `Catalog.lineage` answers: one row an artifact and use, with the number of calls of its making.
WITH_CALLS = """
SELECT l.*, (SELECT count(*) FROM calls c WHERE c.execution = l.execution) AS calls
FROM lineage(?) l ORDER BY l.depth, l.kind, l.id
"""
