module example.com/tandem-example

go 1.23

require (
	google.golang.org/grpc v1.71.0
	google.golang.org/protobuf v1.36.5
)
