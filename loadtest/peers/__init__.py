"""What a user would pick instead: MySQL behind Redis or memcached, and MySQL alone, each as its documentation says."""
