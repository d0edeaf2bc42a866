-- Tables of one shard. The connection's database is the shard's; safe to run twice.
-- Ids are 63 bits; times 0 … 2^63 - 1; names and data are bytes, so that comparison and storage never depend on a
-- character set. VARBINARY and never BINARY: a binlog reader loses the trailing zero bytes of the latter.

CREATE TABLE IF NOT EXISTS objects (
  id BIGINT UNSIGNED NOT NULL,
  otype SMALLINT UNSIGNED NOT NULL,
  version BIGINT UNSIGNED NOT NULL,
  deleted TINYINT UNSIGNED NOT NULL DEFAULT 0,
  data MEDIUMBLOB NOT NULL,
  PRIMARY KEY (id)
) ENGINE = InnoDB;

CREATE TABLE IF NOT EXISTS assocs (
  id1 BIGINT UNSIGNED NOT NULL,
  atype SMALLINT UNSIGNED NOT NULL,
  id2 BIGINT UNSIGNED NOT NULL,
  time BIGINT UNSIGNED NOT NULL,
  version BIGINT UNSIGNED NOT NULL,
  data VARBINARY(255) NOT NULL,
  PRIMARY KEY (id1, atype, id2),
  KEY by_time (id1, atype, time DESC, id2 DESC)
) ENGINE = InnoDB;

-- The row stays when the count is 0, so a list's version never goes back.
CREATE TABLE IF NOT EXISTS assoc_lists (
  id1 BIGINT UNSIGNED NOT NULL,
  atype SMALLINT UNSIGNED NOT NULL,
  count BIGINT UNSIGNED NOT NULL,
  version BIGINT UNSIGNED NOT NULL,
  PRIMARY KEY (id1, atype)
) ENGINE = InnoDB;

-- One row. Every write transaction locks it in share mode, a takeover exclusively.
CREATE TABLE IF NOT EXISTS shard (
  only_row TINYINT UNSIGNED NOT NULL,
  master_server VARBINARY(255) NOT NULL,
  version_epoch BIGINT UNSIGNED NOT NULL,
  owner VARBINARY(255) NOT NULL,
  generation BIGINT UNSIGNED NOT NULL,
  PRIMARY KEY (only_row)
) ENGINE = InnoDB;

-- Inverse edges still to be written on another shard; atypes are decimal numbers, separated by commas.
CREATE TABLE IF NOT EXISTS inverse_intents (
  low_id BIGINT UNSIGNED NOT NULL,
  high_id BIGINT UNSIGNED NOT NULL,
  atypes VARBINARY(4096) NOT NULL,
  token BIGINT UNSIGNED NOT NULL,
  created_unix_ms BIGINT UNSIGNED NOT NULL,
  PRIMARY KEY (low_id, high_id),
  KEY by_creation (created_unix_ms)
) ENGINE = InnoDB;

-- Written on the master and replicated: the replica's lag is seen even on an idle stream.
CREATE TABLE IF NOT EXISTS heartbeat (
  writer VARBINARY(255) NOT NULL,
  written_unix_ms BIGINT UNSIGNED NOT NULL,
  PRIMARY KEY (writer)
) ENGINE = InnoDB;
