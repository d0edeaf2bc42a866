-- The states of whole nodes, each for the edges of one type. A node without a row is normal. A node needs no object.
CREATE TABLE IF NOT EXISTS node_states (
  id BIGINT UNSIGNED NOT NULL,
  atype SMALLINT UNSIGNED NOT NULL,
  state TINYINT UNSIGNED NOT NULL,
  state_us BIGINT UNSIGNED NOT NULL,
  PRIMARY KEY (id, atype)
) ENGINE = InnoDB;

-- What an edge knows of node id2: its state, and the time of that, as node_states has it at the shard of id2 for the
-- inverse type. MySQL cannot add a column only where it is missing, so the statement is chosen here: a migration that
-- was cut off runs again.
SET @add_columns = IF(
  EXISTS (
    SELECT 1 FROM information_schema.columns
    WHERE table_schema = DATABASE() AND table_name = 'assocs_states' AND column_name = 'id2_state'
  ),
  'DO 0',
  'ALTER TABLE assocs_states
    ADD COLUMN id2_state TINYINT UNSIGNED NOT NULL DEFAULT 0,
    ADD COLUMN id2_state_us BIGINT UNSIGNED NOT NULL DEFAULT 0'
);
PREPARE add_columns FROM @add_columns;
EXECUTE add_columns;
DEALLOCATE PREPARE add_columns;
