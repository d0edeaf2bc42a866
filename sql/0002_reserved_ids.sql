-- One row. No id of the shard with a higher time has been given out. Only the shard's owner raises it, a minute ahead of
-- use, and a promotion does. Without the row, which no leader has written yet, nothing is known.
CREATE TABLE IF NOT EXISTS reserved_ids (
  only_row TINYINT UNSIGNED NOT NULL,
  reserved_unix_ms BIGINT UNSIGNED NOT NULL,
  PRIMARY KEY (only_row)
) ENGINE = InnoDB;
