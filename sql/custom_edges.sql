-- The table of an association type whose data outgrows the default table; made in each shard by the migration runner
-- for the tables that the schema names. How long data may be is the schema's business, so that raising a type's bound
-- alters no table.
CREATE TABLE IF NOT EXISTS {table} (
  id1 BIGINT UNSIGNED NOT NULL,
  atype SMALLINT UNSIGNED NOT NULL,
  id2 BIGINT UNSIGNED NOT NULL,
  time BIGINT UNSIGNED NOT NULL,
  version BIGINT UNSIGNED NOT NULL,
  data MEDIUMBLOB NOT NULL,
  PRIMARY KEY (id1, atype, id2),
  KEY by_time (id1, atype, time DESC, id2 DESC)
) ENGINE = InnoDB;
