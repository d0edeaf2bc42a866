"""Changesets of row images, as leader and tailer compute them."""

from tao.model.changes import GoneEdge, ListChange, ObjectChange
from tao.model.graph import ABSENT, Edge, ListKey, deleted_data, deleted_otype, encode_object
from tao.model.rows import ListRow, ObjectRow
from tao.planning.net_changes import ListImages, ObjectImages, net_changes


def test_images_in_any_order_give_one_changeset() -> None:
    objects = [ObjectImages(None, ObjectRow(each, 1, 1, False, b"")) for each in (5, 2)]
    lists = [ListImages(ListKey(*key), None, ListRow(0, 1), ()) for key in ((3, 2), (3, 1), (1, 9))]
    changes = net_changes(objects, lists)
    assert changes == net_changes(objects[::-1], lists[::-1])
    assert [change.id if isinstance(change, ObjectChange) else (change.id1, change.atype) for change in changes] == [
        *(2, 5),
        *((1, 9), (3, 1), (3, 2)),
    ]


def test_edges_are_gone_with_their_old_time_and_put_with_the_new_in_list_order() -> None:
    images = ListImages(
        ListKey(1, 2),
        ListRow(4, 10),
        ListRow(4, 11),
        [
            (Edge(7, 5), None),
            (Edge(8, 6), Edge(8, 4)),
            (Edge(9, 6, b"a"), Edge(9, 6, b"b")),
            (Edge(3, 3), Edge(3, 3)),
            (None, Edge(2, 6)),
        ],
    )
    assert net_changes([], [images]) == (
        ListChange(1, 2, 10, 11, 4, (GoneEdge(8, 6), GoneEdge(7, 5)), (Edge(9, 6, b"b"), Edge(2, 6), Edge(8, 4))),
    )


def test_a_deleted_object_is_absent_and_says_what_type_it_had() -> None:
    images = ObjectImages(ObjectRow(1, 2, 3, False, b"x"), ObjectRow(1, 2, 4, True, b""))
    (change,) = net_changes([images], [])
    assert change == ObjectChange(1, 3, 4, ABSENT, deleted_data(2))
    assert isinstance(change, ObjectChange)
    assert deleted_otype(encode_object(change.after, change.otype, change.data or b"")) == 2
