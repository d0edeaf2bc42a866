-- The edges of types with states: those of `assocs`, and the registers whose join each edge is. Times of operations are
-- microseconds since 1970, 0 where none has set the register; changed_unix_s is the clock's second of the last change,
-- by which removed edges are purged.
CREATE TABLE IF NOT EXISTS assocs_states (
  id1 BIGINT UNSIGNED NOT NULL,
  atype SMALLINT UNSIGNED NOT NULL,
  id2 BIGINT UNSIGNED NOT NULL,
  time BIGINT UNSIGNED NOT NULL,
  version BIGINT UNSIGNED NOT NULL,
  data VARBINARY(255) NOT NULL,
  own_state TINYINT UNSIGNED NOT NULL DEFAULT 0,
  state_us BIGINT UNSIGNED NOT NULL DEFAULT 0,
  payload_us BIGINT UNSIGNED NOT NULL DEFAULT 0,
  changed_unix_s BIGINT UNSIGNED NOT NULL DEFAULT 0,
  PRIMARY KEY (id1, atype, id2),
  KEY by_time (id1, atype, time DESC, id2 DESC)
) ENGINE = InnoDB;
