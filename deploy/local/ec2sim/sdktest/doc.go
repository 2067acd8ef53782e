// Package sdktest holds the test of the simulator with the real EC2 client of
// the AWS SDK. That client takes long to compile, so nothing else in this
// module imports it.
package sdktest
