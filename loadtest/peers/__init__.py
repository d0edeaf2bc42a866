"""The alternatives to tao, each used as its documentation recommends: MySQL behind Redis or memcached, and MySQL
alone."""
