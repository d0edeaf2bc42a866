"""One message layer over two transports: protobuf to and from the model, over gRPC and length-prefixed frames.

Code generated from protos/ lies in tao.wire.v1 and is never edited. Roles see one port and do not know which transport
carried a request; one conformance suite holds both to the same behaviour. The roles give requests their meaning.
"""
