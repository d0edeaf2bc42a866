from tao.storage.rows_python import Decoder, Row

def parse_rows(
    data: bytes, at: int, number: int, rows: list[Row], limit: int, decoders: tuple[Decoder | None, ...]
) -> tuple[int, int]: ...
