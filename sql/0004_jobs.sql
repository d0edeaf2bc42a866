-- Background jobs of the shard. A job may be leased from due_unix_ms on; of a leased one, that is the end of its lease.
-- Of each lease, leases has the number: the worker of an earlier one cannot report. A job that repeats begins anew so
-- many seconds after it is done.
CREATE TABLE IF NOT EXISTS jobs (
  id BIGINT UNSIGNED NOT NULL,
  kind VARBINARY(63) NOT NULL,
  priority TINYINT UNSIGNED NOT NULL,
  state TINYINT UNSIGNED NOT NULL,
  due_unix_ms BIGINT UNSIGNED NOT NULL,
  attempts INT UNSIGNED NOT NULL,
  leases BIGINT UNSIGNED NOT NULL,
  worker VARBINARY(255) NOT NULL,
  body MEDIUMBLOB NOT NULL,
  progress BLOB NOT NULL,
  edges BIGINT UNSIGNED NOT NULL,
  error VARBINARY(1024) NOT NULL,
  created_unix_ms BIGINT UNSIGNED NOT NULL,
  repeat_seconds INT UNSIGNED NOT NULL,
  PRIMARY KEY (id),
  KEY due (state, priority, due_unix_ms)
) ENGINE = InnoDB;

-- The kinds of jobs that no worker is to begin or to go on with.
CREATE TABLE IF NOT EXISTS paused_jobs (
  kind VARBINARY(63) NOT NULL,
  PRIMARY KEY (kind)
) ENGINE = InnoDB;
