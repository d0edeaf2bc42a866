"""Feeds: the newest posts of those whom a reader follows, merged from their lists when the reader looks (pull).

    from tao.client import connect
    from tao.feeds import Feeds

    async with connect("127.0.0.1:7000") as graph:
        feeds = Feeds(graph)
        await feeds.post(author, post)
        page = await feeds.page(reader, 50)
        for post in page.posts:
            print(post.fields)

A post is an edge from its author, and nothing is stored for a reader. So a reader who comes back after a month has a
feed, an author who is unfollowed is out of it at once, and a feed has no end but that of its authors' lists. The
package is built on the SDK (`tao.client`) and installs with it.
"""

from tao.feeds.feeds import MAX_SOURCES, FeedPage, Feeds, Rule
from tao.feeds.sync_feeds import SyncFeeds

__all__ = ["MAX_SOURCES", "FeedPage", "Feeds", "Rule", "SyncFeeds"]
