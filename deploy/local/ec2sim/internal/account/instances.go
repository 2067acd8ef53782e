package account

import (
	"fmt"
	"slices"
	"time"
)

// maxLaunch bounds how many instances one RunInstances call may ask for.
const maxLaunch = 1000

// LaunchInterface is one NetworkInterface.N of RunInstances: an interface to
// make, or with NetworkInterfaceID one that exists.
type LaunchInterface struct {
	AddressSpec         `query:",inline"`
	NetworkInterfaceID  ENIID     `query:"NetworkInterfaceId"`
	DeviceIndex         *int      `query:"DeviceIndex"`
	NetworkCardIndex    int       `query:"NetworkCardIndex"`
	SubnetID            SubnetID  `query:"SubnetId"`
	SecurityGroups      []GroupID `query:"SecurityGroupId"`
	Description         string    `query:"Description"`
	DeleteOnTermination *bool     `query:"DeleteOnTermination"`
}

// RunInstancesRequest is the input of RunInstances.
type RunInstancesRequest struct {
	DryRun         `query:",inline"`
	ImageID        string    `query:"ImageId"`
	InstanceType   string    `query:"InstanceType"`
	MinCount       *int      `query:"MinCount"`
	MaxCount       *int      `query:"MaxCount"`
	SubnetID       SubnetID  `query:"SubnetId"`
	PrivateIP      string    `query:"PrivateIpAddress"`
	SecurityGroups []GroupID `query:"SecurityGroupId"`
	Placement      struct {
		AvailabilityZone string `query:"AvailabilityZone"`
	} `query:"Placement"`
	NetworkInterfaces []LaunchInterface  `query:"NetworkInterface"`
	TagSpecifications []TagSpecification `query:"TagSpecification"`
	ClientToken       string             `query:"ClientToken" json:"-"`
}

// InstanceDetail is an instance with the interfaces that are attached to it,
// by network card and device index.
type InstanceDetail struct {
	Instance
	Attached []NetworkInterface
}

// RunInstancesResponse is the output of RunInstances.
type RunInstancesResponse struct {
	Reservation string
	Instances   []InstanceDetail
}

// RunInstances launches between MinCount and MaxCount instances, as many as
// the subnet has addresses for. They run at once.
func (a *Account) RunInstances(req RunInstancesRequest) (RunInstancesResponse, *Error) {
	var resp RunInstancesResponse
	err := a.mutate(req.DryRun.DryRun, func(s *state, now time.Time) *Error {
		plan, err := s.planLaunch(req)
		if err != nil {
			return err
		}
		const action = "RunInstances"
		print := fingerprint(req)
		earlier, found, err := s.recall(action, req.ClientToken, print, now)
		if err != nil {
			return err
		}
		ids := earlier.instances
		if !found {
			if ids, err = s.launchMany(plan, now); err != nil {
				return err
			}
			s.remember(action, req.ClientToken, token{fingerprint: print, expires: now.Add(tokenLifetime), instances: ids})
		}
		for _, id := range ids {
			instance, _ := s.instances.get(id)
			resp.Reservation = instance.Reservation
			resp.Instances = append(resp.Instances, s.detail(instance))
		}
		return nil
	})
	if err != nil {
		return RunInstancesResponse{}, err
	}
	return resp, nil
}

// launch is a RunInstances request that was checked.
type launch struct {
	image, typ    string
	zone          string // empty: the subnet's
	clientToken   string
	min, max      int // how many
	interfaces    []LaunchInterface
	instanceTags  []Tag
	interfaceTags []Tag
	reservation   string
	id            InstanceID // empty: a new one
}

func (s *state) planLaunch(req RunInstancesRequest) (launch, *Error) {
	switch {
	case req.ImageID == "":
		return launch{}, missing("ImageId")
	case req.InstanceType == "":
		return launch{}, missing("InstanceType")
	case req.MinCount == nil:
		return launch{}, missing("MinCount")
	case req.MaxCount == nil:
		return launch{}, missing("MaxCount")
	}
	low, high := *req.MinCount, *req.MaxCount
	switch {
	case low < 1 || low > high:
		return launch{}, invalid("Value (%d) for parameter minCount is invalid. It must be between 1 and maxCount.", low)
	case high > maxLaunch:
		return launch{}, Errorf("InstanceLimitExceeded", "At most %d instances can be launched by one request.", maxLaunch)
	}
	if _, ok := s.limits.Lookup(req.InstanceType); !ok {
		return launch{}, invalid("Invalid value '%s' for InstanceType.", req.InstanceType)
	}
	tags, err := specifiedTags(req.TagSpecifications, "instance", "network-interface", "volume")
	if err != nil {
		return launch{}, err
	}
	interfaces, err := launchInterfaces(req, high)
	if err != nil {
		return launch{}, err
	}
	return launch{
		image: req.ImageID, typ: req.InstanceType, zone: req.Placement.AvailabilityZone, clientToken: req.ClientToken, min: low, max: high,
		interfaces: interfaces, instanceTags: tags["instance"], interfaceTags: tags["network-interface"],
	}, nil
}

func launchInterfaces(req RunInstancesRequest, count int) ([]LaunchInterface, *Error) {
	if len(req.NetworkInterfaces) == 0 {
		if req.SubnetID == "" {
			return nil, missing("subnetId") // no VPC is a default one here
		}
		if req.PrivateIP != "" && count > 1 {
			return nil, combination("The parameter privateIpAddress cannot be used when more than one instance is launched")
		}
		zero := 0
		return []LaunchInterface{{
			DeviceIndex: &zero, SubnetID: req.SubnetID, SecurityGroups: req.SecurityGroups,
			AddressSpec: AddressSpec{PrivateIPAddress: req.PrivateIP},
		}}, nil
	}
	if req.SubnetID != "" || req.PrivateIP != "" || len(req.SecurityGroups) > 0 {
		return nil, combination("Network interfaces and an instance-level subnet ID, address or security groups may not be specified on the same request")
	}
	specs := slices.Clone(req.NetworkInterfaces)
	primary := -1
	for i, spec := range specs {
		switch {
		case spec.DeviceIndex == nil:
			return nil, missing("networkInterface.deviceIndex")
		case spec.NetworkInterfaceID == "" && spec.SubnetID == "":
			return nil, missing("networkInterface.subnetId")
		case spec.NetworkInterfaceID != "" && (spec.SubnetID != "" || len(spec.SecurityGroups) > 0):
			return nil, combination("A network interface may not specify both a network interface ID and a subnet or security groups")
		case spec.NetworkInterfaceID != "" && count > 1:
			return nil, combination("A network interface ID cannot be used when more than one instance is launched")
		case spec.PrivateIPAddress != "" && count > 1:
			return nil, combination("The parameter privateIpAddress cannot be used when more than one instance is launched")
		}
		if *spec.DeviceIndex == 0 && spec.NetworkCardIndex == 0 {
			primary = i
		}
	}
	if primary < 0 {
		return nil, invalid("When specifying network interfaces, you must include a device at index 0.")
	}
	specs[0], specs[primary] = specs[primary], specs[0]
	return specs, nil
}

func (s *state) launchSubnet(spec LaunchInterface) (Subnet, *Error) {
	id := spec.SubnetID
	if spec.NetworkInterfaceID != "" {
		eni, err := s.eni(spec.NetworkInterfaceID)
		if err != nil {
			return Subnet{}, err
		}
		id = eni.Subnet
	}
	return find(s.subnets, kindSubnet(), id)
}

func (s *state) launchMany(plan launch, now time.Time) ([]InstanceID, *Error) {
	plan.reservation = s.newID("r-")
	var ids []InstanceID
	for i := range plan.max {
		mark := s.journal.mark()
		id, err := s.launchOne(plan, i, now)
		if err != nil && err.Code == codeSubnetFull && i >= plan.min {
			s.journal.rollback(mark)
			break
		}
		if err != nil {
			return nil, err
		}
		ids = append(ids, id)
	}
	return ids, nil
}

func (s *state) launchOne(plan launch, index int, now time.Time) (InstanceID, *Error) {
	subnet, err := s.launchSubnet(plan.interfaces[0])
	if err != nil {
		return "", err
	}
	if plan.zone != "" && plan.zone != subnet.Zone {
		return "", invalid("The availability zone '%s' is not the one of subnet %s.", plan.zone, subnet.ID)
	}
	id := plan.id
	if id == "" {
		id = InstanceID(s.newID("i-"))
	}
	instance := Instance{
		ID: id, Type: plan.typ, Image: plan.image, State: StateRunning, Zone: subnet.Zone, ZoneID: subnet.ZoneID,
		Reservation: plan.reservation, LaunchIndex: index, LaunchTime: now, ClientToken: plan.clientToken,
		Tags: plan.instanceTags, Subnet: subnet.ID, VPC: subnet.VPC,
	}
	s.instances.put(id, instance)
	for i, spec := range plan.interfaces {
		eni, deleteOnTermination, err := s.launchInterface(spec, plan.interfaceTags, now)
		if err != nil {
			return "", err
		}
		if eni.Zone != instance.Zone {
			return "", combination("All network interfaces of an instance must be in the same availability zone")
		}
		instance, _ = s.instances.get(id)
		if eni, err = s.attach(eni, instance, *spec.DeviceIndex, spec.NetworkCardIndex, deleteOnTermination, now); err != nil {
			return "", err
		}
		if i == 0 {
			instance, _ = s.instances.get(id)
			instance.Address = eni.Primary
			s.instances.put(id, instance)
		}
	}
	return id, nil
}

func (s *state) launchInterface(spec LaunchInterface, tags []Tag, now time.Time) (NetworkInterface, bool, *Error) {
	var eni NetworkInterface
	var err *Error
	if spec.NetworkInterfaceID != "" {
		eni, err = s.eni(spec.NetworkInterfaceID)
	} else {
		eni, err = s.createInterface(interfaceSpec{
			subnet: spec.SubnetID, groups: spec.SecurityGroups, description: spec.Description, addresses: spec.AddressSpec, tags: tags,
		}, now)
	}
	// What EC2 made for the instance goes with it unless the caller says otherwise.
	deleteOnTermination := spec.NetworkInterfaceID == ""
	if spec.DeleteOnTermination != nil {
		deleteOnTermination = *spec.DeleteOnTermination
	}
	return eni, deleteOnTermination, err
}

// InstanceStateChange is one row of the output of TerminateInstances.
type InstanceStateChange struct {
	InstanceID InstanceID
	Previous   InstanceState
	Current    InstanceState
}

// TerminateInstancesRequest is the input of TerminateInstances.
type TerminateInstancesRequest struct {
	DryRun      `query:",inline"`
	InstanceIDs []InstanceID `query:"InstanceId"`
}

// TerminateInstances terminates all the instances at once, or none. Their
// interfaces are deleted if their attachment says so, and available otherwise.
func (a *Account) TerminateInstances(req TerminateInstancesRequest) ([]InstanceStateChange, *Error) {
	var changes []InstanceStateChange
	err := a.mutate(req.DryRun.DryRun, func(s *state, now time.Time) *Error {
		if len(req.InstanceIDs) == 0 {
			return missing("InstanceId")
		}
		for _, id := range req.InstanceIDs {
			instance, err := s.instance(id, now)
			if err != nil {
				return err
			}
			s.terminate(instance, now)
			changes = append(changes, InstanceStateChange{InstanceID: id, Previous: instance.State, Current: StateTerminated})
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return changes, nil
}

func (s *state) terminate(instance Instance, now time.Time) {
	if instance.State == StateTerminated {
		return
	}
	for _, id := range instance.Interfaces {
		eni, _ := s.enis.get(id)
		deleteIt := eni.Attachment.DeleteOnTermination
		if eni = s.detach(eni); deleteIt {
			s.deleteInterface(eni)
		}
	}
	instance, _ = s.instances.get(instance.ID)
	instance.State, instance.Terminated = StateTerminated, now
	instance.Subnet, instance.VPC = "", ""
	instance.Address = Instance{}.Address
	s.instances.put(instance.ID, instance)
}

// SetInstanceState puts an instance that is not terminated into a state of its
// life cycle; StateTerminated terminates it. EC2 has no such action: it is for
// those who set up a test.
func (a *Account) SetInstanceState(id InstanceID, to InstanceState) *Error {
	return a.mutate(false, func(s *state, now time.Time) *Error {
		if _, ok := to.Code(); !ok {
			return invalid("There is no instance state '%s'.", to)
		}
		instance, err := s.instance(id, now)
		if err != nil {
			return err
		}
		if instance.State == StateTerminated {
			return Errorf("IncorrectInstanceState", "Instance '%s' is terminated.", id)
		}
		if to == StateTerminated {
			s.terminate(instance, now)
			return nil
		}
		instance.State = to
		s.instances.put(id, instance)
		return nil
	})
}

// instance finds an instance that can still be seen.
func (s *state) instance(id InstanceID, now time.Time) (Instance, *Error) {
	instance, err := find(s.instances, kindInstance(), id)
	if err == nil && !instance.visible(now) {
		return Instance{}, kindInstance().missing(string(id))
	}
	return instance, err
}

func (i Instance) visible(now time.Time) bool {
	return i.State != StateTerminated || now.Sub(i.Terminated) < terminatedVisible
}

func (s *state) detail(instance Instance) InstanceDetail {
	d := InstanceDetail{Instance: instance}
	for _, id := range instance.Interfaces {
		eni, _ := s.enis.get(id)
		d.Attached = append(d.Attached, eni)
	}
	return d
}

// PrivateDNSName is the host name that EC2 gives to an address in a region.
func PrivateDNSName(region string, addr fmt.Stringer) string {
	domain := region + ".compute.internal"
	if region == "us-east-1" {
		domain = "ec2.internal"
	}
	name := []byte("ip-" + addr.String())
	for i, c := range name {
		if c == '.' {
			name[i] = '-'
		}
	}
	return string(name) + "." + domain
}
